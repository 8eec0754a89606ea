"""Which engine runs, in which order the wishes count, and what an engine that cannot run says."""

import threading

from forge_mlx.metal import engine
from forge_mlx.metal.engine import ENGINES, Engine, missing, resolve, use_engine
import mlx.core as mx
import pytest


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv("FORGE_MLX_ENGINE", raising=False)


@pytest.fixture
def on_gpu(monkeypatch):
    """As on a Mac: the default device is a GPU and Metal is there."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)


@pytest.mark.usefixtures("on_cpu")
def test_automatic_on_a_cpu_is_the_reference():
    assert resolve("op") == Engine("reference", "the default device is a CPU")


@pytest.mark.usefixtures("on_gpu")
def test_automatic_on_an_apple_gpu_is_metal():
    assert resolve("op") == Engine("metal", "the default device is a GPU")


@pytest.mark.usefixtures("on_gpu")
def test_automatic_follows_the_default_device(monkeypatch):
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    assert resolve("op").name == "reference"


@pytest.mark.usefixtures("on_gpu")
def test_automatic_on_another_gpu_never_takes_cuda(monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert resolve("op") == Engine("reference", "no engine for kernels runs on this GPU")


@pytest.mark.usefixtures("on_gpu")
def test_automatic_takes_the_op_of_mlx_where_it_is_better():
    reason = "plain causal attention is faster in mx.fast"
    assert resolve("op", prefer_mlx=reason) == Engine("reference", reason)
    assert resolve("op", "metal", prefer_mlx=reason).name == "metal"


@pytest.mark.usefixtures("on_gpu")
def test_call_comes_before_block_before_variable_before_automatic(monkeypatch):
    assert resolve("op").name == "metal"
    monkeypatch.setenv("FORGE_MLX_ENGINE", "reference")
    assert resolve("op") == Engine("reference", "FORGE_MLX_ENGINE is set")
    with use_engine("metal"):
        assert resolve("op") == Engine("metal", "use_engine")
        with use_engine("reference"):
            assert resolve("op", "metal") == Engine("metal", "the call's impl=")
            assert resolve("op") == Engine("reference", "use_engine")
        assert resolve("op").name == "metal"
    assert resolve("op").name == "reference"


@pytest.mark.usefixtures("on_cpu")
def test_block_ends_with_an_error():
    with pytest.raises(KeyError), use_engine("reference"):
        raise KeyError
    assert resolve("op").reason == "the default device is a CPU"


@pytest.mark.usefixtures("on_gpu")
def test_block_belongs_to_its_thread():
    seen = []
    with use_engine("reference"):
        thread = threading.Thread(target=lambda: seen.append(resolve("op").name))
        thread.start()
        thread.join()
    assert seen == ["metal"]


@pytest.mark.usefixtures("on_cpu")
def test_empty_variable_is_none(monkeypatch):
    monkeypatch.setenv("FORGE_MLX_ENGINE", "")
    assert resolve("op").reason == "the default device is a CPU"


@pytest.mark.parametrize("name", ["Metal", "metall", "gpu", ""])
@pytest.mark.usefixtures("on_cpu")
def test_unknown_name_lists_those_that_exist(monkeypatch, name):
    allowed = "must be among metal, cuda, emulator, reference but got"
    with pytest.raises(ValueError, match=rf"^\[engine\] impl {allowed} '{name}'"):
        resolve("op", name)
    with pytest.raises(ValueError, match=rf"^\[engine\] use_engine {allowed}"), use_engine(name):
        pass
    if name:
        monkeypatch.setenv("FORGE_MLX_ENGINE", name)
        with pytest.raises(ValueError, match=rf"^\[engine\] FORGE_MLX_ENGINE {allowed}"):
            resolve("op")


def test_unknown_name_gets_the_nearest():
    with pytest.raises(ValueError, match=r"Did you mean emulator\?$"):
        resolve("op", "emulater")


@pytest.mark.usefixtures("on_cpu")
def test_metal_without_metal_raises_and_does_not_fall_back(monkeypatch):
    text = r"engine metal cannot run: MLX finds no Metal device here: it needs a Mac with Apple silicon\.$"
    with pytest.raises(RuntimeError, match=r"^\[rms_norm\] " + text):
        resolve("rms_norm", "metal")
    with pytest.raises(RuntimeError, match=r"^\[engine\] " + text), use_engine("metal"):
        pass
    monkeypatch.setenv("FORGE_MLX_ENGINE", "metal")
    with pytest.raises(RuntimeError, match=r"^\[rms_norm\] " + text):
        resolve("rms_norm")


@pytest.mark.usefixtures("on_gpu")
def test_cuda_says_that_it_is_not_built():
    with pytest.raises(RuntimeError, match=r"^\[op\] engine cuda cannot run: it is not built yet"):
        resolve("op", "cuda")


@pytest.mark.usefixtures("on_cpu")
def test_emulator_without_its_packages_says_what_to_install(monkeypatch):
    monkeypatch.setattr(engine, "find_spec", lambda module: None if module == "elftools" else object())
    with pytest.raises(RuntimeError, match=r'it needs pyelftools: pip install "forge-mlx\[emulator\]"'):
        resolve("op", "emulator")


def test_emulator_runs_here():
    assert missing("emulator") is None
    assert resolve("op", "emulator") == Engine("emulator", "the call's impl=")


def test_text_is_for_a_banner():
    assert str(Engine("reference", "the default device is a CPU")) == "reference (the default device is a CPU)"
    assert ENGINES == ("metal", "cuda", "emulator", "reference")
