"""Models that checkpoints give: of an MoE, and of quantisation-aware training before, in and behind its phase."""

from functools import partial
import json
import shutil

from forge_mlx import export, generate
from forge_mlx.hub.native import ModelFolderError, load_model
from forge_mlx.models.moe import MoE
from forge_mlx.models.qat import prepare_qat
from forge_mlx.models.registry import build_model
from forge_mlx.nn.parameters import named_arrays
from forge_mlx.opened_model import open_model
from forge_mlx.train.config import TrainConfig
from forge_mlx.train.load import load_config
from forge_mlx.train.loop import train
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

VALUES = {
    "run": {"device": "cpu"},
    "data": {"tokenizer": {"vocab_size": 300}},
    "model": {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "max_seq_len": 32, "intermediate_size": 64},
    "train": {
        **{"steps": 4, "batch_size": 2, "seq_len": 16, "checkpoint_every": 2, "sample_tokens": 1},
        **{"final_eval_tokens": 32, "eval_tokens": 32},
    },
    # Far enough from the first weights that every step's codes are its own.
    "optim": {"lr": 0.05, "warmup_steps": 0},
}
EXPERTS = {"arch": "moe", "num_experts": 3, "experts_per_token": 2}
QAT = {"weights": "affine", "bits": 4, "group_size": 32}
RUNS = {
    "moe": {"model": EXPERTS},
    "qat": {"qat": {**QAT, "start_step": 3}},
    "qat that ends": {"qat": {**QAT, "start_step": 1, "end_step": 3}},
    "qat at its first step": {"qat": {**QAT, "start_step": 2}},
    "moe with qat in bfloat16": {
        "run": {"dtype": "bfloat16"},
        "model": {**EXPERTS, "selection_bias": True, "bias_rate": 0.01},
        "qat": {**QAT, "start_step": 3},
    },
}
# Each is a training run of its own.
EVERY_RUN = [name if name in ("moe", "qat") else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
IN_FLOAT32 = EVERY_RUN[:-1]
# Which of the two checkpoints, of steps 2 and 4, is quantised.
QUANTISED = {
    "moe": (False, False),
    "qat": (False, True),
    "qat that ends": (True, False),
    "qat at its first step": (True, True),
    "moe with qat in bfloat16": (False, True),
}


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """Name -> the folder of a finished run of four steps, trained when it is first asked for."""
    folder = tmp_path_factory.mktemp("runs")
    corpus = folder / "corpus.txt"
    corpus.write_text("".join(f"def f_{i}(x):\n    return x + {i}\n" for i in range(300)), encoding="utf-8")

    def of(name):
        path = folder / name
        if not path.exists():
            changes = RUNS[name]
            values = {key: VALUES.get(key, {}) | changes.get(key, {}) for key in VALUES.keys() | changes.keys()}
            values["run"] = values["run"] | {"dir": str(path)}
            values["data"] = values["data"] | {"source": [str(corpus)]}
            train(TrainConfig.model_validate_json(json.dumps(values)), log=lambda _: None)
        return path

    return of


@pytest.fixture
def unfinished(run_of, tmp_path):
    """Name -> a copy of a run without its final model."""

    def of(name):
        path = shutil.copytree(run_of(name), tmp_path / "run")
        shutil.rmtree(path / "final")
        return path

    return of


def checkpoint(run, step):
    return run / "checkpoints" / f"step-{step:08d}"


def contents(model):
    """Dtype, shape and bytes of every array."""
    arrays = named_arrays(model.parameters())
    return {name: (array.dtype, array.shape, bytes(memoryview(array.view(mx.uint8)))) for name, array in arrays}


def float_model(run, step):
    model = build_model(load_config(run / "config.yaml").model)
    model.load_weights(str(checkpoint(run, step) / "model.safetensors"))
    return model.eval()


def logits(model):
    return np.array(model(mx.arange(12)[None] * 7).astype(mx.float32))


def is_quantised(model):
    return isinstance(model.layers[0].self_attn.q_proj, nn.QuantizedLinear)


@pytest.mark.parametrize("name", EVERY_RUN)
def test_the_last_checkpoint_is_the_final_model(run_of, name):
    run = run_of(name)
    final, _ = load_model(run / "final")
    opened, _, source, *_ = open_model(checkpoint(run, 4))
    assert source == checkpoint(run, 4)
    assert not opened.training
    assert is_quantised(opened) == is_quantised(final) == QUANTISED[name][1]
    assert contents(opened) == contents(final)
    assert np.array_equal(logits(opened), logits(final))


@pytest.mark.parametrize("name", IN_FLOAT32)
@pytest.mark.parametrize("step", [2, 4])
def test_a_checkpoint_computes_as_its_step_was_to_go_on(run_of, name, step):
    run = run_of(name)
    opened = open_model(checkpoint(run, step))[0]
    plain = float_model(run, step)
    assert isinstance(opened, MoE) == ("moe" in name)
    if not QUANTISED[name][step // 4]:
        assert contents(opened) == contents(plain)
        return
    before = logits(plain)
    trained = logits(prepare_qat(plain, load_config(run / "config.yaml").qat))
    rounding = 1e-5 * np.abs(trained).max()
    assert np.abs(logits(opened) - trained).max() <= rounding < np.abs(trained - before).max() / 100


@pytest.mark.parametrize("name", ["moe", "qat"])
def test_text_of_a_checkpoint(run_of, unfinished, name, call_main):
    command = partial(call_main, generate.main)
    options = ("--prompt", "def ", "--max-tokens", 8, "--temperature", 2)
    run, cut = run_of(name), unfinished(name)
    of_final = command(run, *options)
    assert of_final[0] == 0
    assert command(cut, *options) == (0, of_final[1], f"[{checkpoint(cut, 4)}]\n")
    earlier = command(checkpoint(cut, 2), *options)
    assert earlier[0] == 0
    assert earlier[1] != of_final[1]


@pytest.mark.parametrize(
    ("name", "summary"),
    [
        ("moe", "mixtral, float32"),
        ("qat", "llama, affine 4 bits in groups of 32"),
        pytest.param("qat that ends", "llama, float32", marks=pytest.mark.slow),
    ],
)
def test_an_exported_checkpoint_is_the_exported_final_model(run_of, unfinished, tmp_path, name, summary, call_main):
    command = partial(call_main, export.main)
    assert command(run_of(name), tmp_path / "a")[0] == 0
    status, out, err = command(unfinished(name), tmp_path / "b")
    assert (status, err) == (0, "")
    assert out.startswith(f"wrote {tmp_path / 'b'} from {checkpoint(tmp_path / 'run', 4)} ({summary}); ")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


@pytest.mark.parametrize(("step", "summary"), [(2, "llama, float32"), (4, "llama, affine 4 bits in groups of 32")])
def test_an_export_says_in_which_phase_the_checkpoint_was(run_of, tmp_path, step, summary, call_main):
    status, out, _ = call_main(export.main, checkpoint(run_of("qat"), step), tmp_path / "out")
    assert status == 0
    assert f" ({summary}); " in out
    assert ("quantization" in json.loads((tmp_path / "out" / "config.json").read_text())) == (step == 4)


def test_the_phase_is_that_of_the_step_whatever_the_folder_is_called(unfinished):
    run = unfinished("qat")
    renamed = checkpoint(run, 4).rename(run / "checkpoints" / "mine")
    assert is_quantised(open_model(renamed)[0])
    assert not is_quantised(open_model(run)[0])


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"state": {}}', '{"state": {"step": null}}'])
def test_a_checkpoint_without_its_step_is_an_error(unfinished, content):
    run = unfinished("qat")
    file = checkpoint(run, 4) / "state.json"
    file.write_text(content)
    with pytest.raises(ModelFolderError, match=r"step-00000004/state\.json: is damaged: "):
        open_model(run)


def test_codes_of_an_unknown_dtype_are_not_guessed(unfinished):
    run = unfinished("qat")
    config = run / "config.yaml"
    text = config.read_text()
    assert "dtype: float32" in text
    config.write_text(text.replace("dtype: float32", "dtype: auto"))
    with pytest.raises(ModelFolderError, match=r"config\.yaml: run\.dtype must be what the run was trained in but got"):
        open_model(run)
    assert not is_quantised(open_model(checkpoint(run, 2))[0])
