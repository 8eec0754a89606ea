"""`emulator.patch()` stands in for Metal, for any library, and leaves nothing behind."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
import importlib
import subprocess
import sys

from forge_mlx.metal import emulator
from forge_mlx.metal.emulator.settings import current_settings
from forge_mlx.metal.kernel import MetalKernel
import mlx.core as mx
import pytest

LIBRARY = """\
from functools import cache
import mlx.core as mx

AVAILABLE = mx.metal.is_available()
AT_IMPORT = mx.fast.metal_kernel("at_import", ["x"], ["out"], "out[thread_position_in_grid.x] = x[0] + 1;")


@cache
def cached():
    return mx.fast.metal_kernel("cached", ["x"], ["out"], "out[thread_position_in_grid.x] = x[0] + 2;")


def call(kernel):
    if mx.default_device() != mx.gpu:
        raise RuntimeError("needs a GPU")
    return kernel(
        inputs=[mx.zeros((8,))], output_shapes=[(4,)], output_dtypes=[mx.float32], grid=(4, 1, 1),
        threadgroup=(4, 1, 1), stream=mx.default_device(),
    )[0].tolist()
"""


without_metal = pytest.mark.skipif(mx.metal.is_available(), reason="with Metal, MLX's own kernels run")


def state():
    return mx.fast.metal_kernel, mx.metal.is_available, mx.default_device


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Imports a library that builds one kernel at import and keeps another."""
    (tmp_path / "a_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda: importlib.import_module("a_library")
    sys.modules.pop("a_library", None)


def test_a_library_finds_metal(library):
    with emulator.patch():
        module = library()
        assert module.AVAILABLE is True
        assert module.call(module.AT_IMPORT) == [1.0] * 4
        assert module.call(module.cached()) == [2.0] * 4


@without_metal
def test_a_library_imported_before_keeps_its_kernels_without_metal(library):
    module = library()
    with emulator.patch(), pytest.raises(RuntimeError, match="No Metal back-end"):
        module.call(module.AT_IMPORT)


def test_what_is_replaced_and_what_is_not():
    before, device, info = state(), mx.default_device(), mx.device_info()
    with emulator.patch():
        assert mx.fast.metal_kernel is emulator.metal_kernel
        assert mx.metal.is_available() is True
        assert mx.default_device() == mx.gpu
        assert mx.default_device().type == mx.DeviceType.gpu
        assert mx.device_info() == info
        # MLX's own operations still run where they did.
        assert (mx.ones((4,)) + 1).sum().item() == 8
    assert state() == before
    assert mx.default_device() == device


def test_restored_after_an_error():
    before = state()
    with pytest.raises(KeyError), emulator.patch(schedules=3):
        raise KeyError
    assert state() == before
    assert current_settings().schedules == 1


def test_blocks_may_be_nested():
    before = state()
    with emulator.patch(schedules=2):
        with emulator.patch(checks=["bounds"], seed=7):
            assert mx.fast.metal_kernel is emulator.metal_kernel
            assert (current_settings().schedules, current_settings().seed) == (2, 7)
            assert current_settings().checks == {"bounds"}
        assert mx.fast.metal_kernel is emulator.metal_kernel
        assert mx.metal.is_available()
        assert (current_settings().schedules, current_settings().seed) == (2, 0)
    assert state() == before


def test_what_somebody_else_had_replaced_comes_back(monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", other := lambda: False)
    with emulator.patch():
        assert mx.metal.is_available()
    assert mx.metal.is_available is other


@pytest.mark.parametrize(
    ("settings", "error"), [({"schedule": 3}, TypeError), ({"checks": ["bound"]}, ValueError)], ids=["name", "value"]
)
def test_wrong_settings_replace_nothing(settings, error):
    before = state()
    with pytest.raises(error), emulator.patch(**settings):
        pass
    assert state() == before


def in_a_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_settings_of_a_patch_reach_other_threads():
    with emulator.patch(schedules=3, checks=["bounds"]):
        found = in_a_thread(current_settings)
        assert (found.schedules, found.checks) == (3, {"bounds"})
        with emulator.patch(seed=5):
            assert in_a_thread(current_settings) == current_settings() == replace(found, seed=5)
        assert in_a_thread(current_settings) == found
    assert in_a_thread(current_settings) == emulator.Settings()


def test_settings_of_a_thread_stay_in_it_and_win_there():
    def inside():
        with emulator.settings(schedules=7):
            return current_settings()

    with emulator.patch(schedules=3, seed=5), emulator.settings(schedules=2):
        assert (in_a_thread(inside).schedules, in_a_thread(inside).seed) == (7, 5)
        assert in_a_thread(current_settings).schedules == 3
        assert current_settings().schedules == 2
        with emulator.patch(schedules=4):
            # The innermost block decides.
            assert current_settings().schedules == 4
        assert current_settings().schedules == 2


def test_settings_reach_the_launch():
    # Each schedule runs the kernel once, and the counter shows in which order threads come.
    kernel = "out[0] = thread_position_in_grid.x;"
    with emulator.patch(checks=[]):
        build = mx.fast.metal_kernel("last", [], ["out"], kernel)
    arguments = {"inputs": [], "output_shapes": [(1,)], "output_dtypes": [mx.int32], "grid": (64, 1, 1)}
    with emulator.patch(checks=[]):
        build(**arguments, threadgroup=(64, 1, 1))
    with emulator.patch(checks=[], schedules=2), pytest.raises(emulator.ScheduleError, match="'out'"):
        build(**arguments, threadgroup=(64, 1, 1))


def test_the_engine_metal_runs_inside(tmp_path):
    (tmp_path / "one.metal").write_text(
        "kernel void one(device float* out, uint3 thread_position_in_grid [[thread_position_in_grid]]) {\n"
        "  out[thread_position_in_grid.x] = 1;\n}"
    )
    kernel = MetalKernel(tmp_path / "one.metal")
    call = {"output_shapes": [(4,)], "output_dtypes": [mx.float32], "grid": (4, 1, 1), "threadgroup": (4, 1, 1)}
    with emulator.patch():
        assert kernel([], **call, engine="metal")[0].tolist() == [1.0] * 4
        # Automatic sees a Mac.
        assert kernel([], **call)[0].tolist() == [1.0] * 4


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_an_engine_alone_loads_no_compiler():
    code = (
        "import sys, forge_mlx.metal.kernel, forge_mlx.metal.emulator\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('elftools', 'ziglang', 'pytest', 'unittest')])\n"
        "print('forge_mlx.metal.emulator.compile' in sys.modules)"
    )
    done = run_python(code)
    assert done.stdout.split("\n")[:2] == ["[]", "False"], done.stderr


def test_without_pyelftools_it_says_what_to_install():
    code = (
        "import sys\nsys.modules['elftools'] = None\n"
        "from forge_mlx.metal import emulator\nemulator.metal_kernel('f', [], ['out'], 'out[0] = 1;')"
    )
    last = run_python(code).stderr.strip().splitlines()[-1]
    assert last == (
        "forge_mlx.metal.emulator.errors.ToolchainError: the emulator needs the package pyelftools: "
        'pip install "forge-mlx[emulator]"'
    )


def test_unknown_name():
    with pytest.raises(AttributeError, match="has no attribute 'metal_kernels'"):
        emulator.metal_kernels  # noqa: B018
