"""mlx-lm's own tools on a patched model: its LoRA trainer, its checkpointing, its files."""

from functools import partial
import json
from pathlib import Path
import subprocess
import sys

from forge_mlx.patching import loss, patch, unpatch
import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Adam
from mlx.utils import tree_flatten
from mlx_lm.tuner import trainer
from mlx_lm.tuner.callbacks import TrainingCallback
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model, save_model
from mlx_lm_models import VOCAB, check_close, check_gradients, gradients, make, tokens
import numpy as np
import pytest

LORA = {"rank": 4, "scale": 2.0, "dropout": 0.0}


class Losses(TrainingCallback):
    """Collects what mlx-lm's trainer reports."""

    def __init__(self):
        self.train, self.valid = [], []

    def on_train_loss_report(self, train_info):
        self.train.append(train_info["train_loss"])

    def on_val_loss_report(self, val_info):
        self.valid.append(val_info["val_loss"])


class Answers:
    """Rows in which each token follows from the one before, the first tokens of each masked as a prompt."""

    def __init__(self):
        random = np.random.default_rng(1)
        starts, lengths = random.integers(0, VOCAB, 24), random.integers(9, 40, 24)
        self.rows = [[int((start + 3 * i) % VOCAB) for i in range(n)] for start, n in zip(starts, lengths, strict=True)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

    def process(self, row):
        return row, 4


def adapt(model):
    model.freeze()
    mx.random.seed(2)
    linear_to_lora_layers(model, 2, LORA)


def trained(model, folder, loss_function, steps=20, **options):
    """Losses of mlx-lm's trainer, and what it has trained."""
    arguments = trainer.TrainingArgs(
        batch_size=4,
        iters=steps,
        val_batches=2,
        steps_per_report=1,
        steps_per_eval=10,
        steps_per_save=steps,
        max_seq_length=64,
        adapter_file=folder / "adapters.safetensors",
        **options,
    )
    np.random.seed(0)
    losses = Losses()
    trainer.train(
        model,
        Adam(1e-3),
        trainer.CacheDataset(Answers()),
        trainer.CacheDataset(Answers()),
        arguments,
        loss=loss_function,
        training_callback=losses,
    )
    return losses, dict(tree_flatten(model.trainable_parameters()))


def patched_first(model):
    patch(model)
    adapt(model)


def adapted_first(model):
    adapt(model)
    patch(model)


def quantised_between(model):
    patch(model)
    nn.quantize(model, 32, 8)
    adapt(model)
    patch(model)


def quantised_stock(model):
    nn.quantize(model, 32, 8)
    adapt(model)


ORDERS = {
    "patched first": (patched_first, adapt),
    "LoRA first": (adapted_first, adapt),
    "quantised between": (quantised_between, quantised_stock),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama with windows, traditional rope", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("order", ORDERS)
def test_twenty_steps_of_mlx_lms_lora_have_the_same_losses(case, order, tmp_path):
    prepare, prepare_stock = ORDERS[order]
    stock, model = make(case), make(case)
    prepare_stock(stock)
    prepare(model)
    expected, expected_arrays = trained(stock, tmp_path, trainer.default_loss)
    found, arrays = trained(model, tmp_path, loss)
    assert len(expected.train) == 20
    assert len(expected.valid) == 3
    assert expected.train[-1] < expected.train[0] - 0.1
    np.testing.assert_allclose(found.train, expected.train, rtol=1e-5)
    np.testing.assert_allclose(found.valid, expected.valid, rtol=1e-5)
    assert arrays.keys() == expected_arrays.keys()
    saved = mx.load(str(tmp_path / "adapters.safetensors"))
    assert saved.keys() == arrays.keys()
    # mlx-lm's own model takes them.
    stock.load_weights(list(saved.items()), strict=False)
    check_close(stock(tokens(1, 9)), model(tokens(1, 9)))


def test_a_few_steps_of_mlx_lms_lora_have_the_same_losses(tmp_path):
    stock, model = make("llama"), make("llama")
    adapt(stock)
    patched_first(model)
    expected, _ = trained(stock, tmp_path, trainer.default_loss, steps=4)
    found, _ = trained(model, tmp_path, loss, steps=4)
    np.testing.assert_allclose(found.train + found.valid, expected.train + expected.valid, rtol=1e-5)


@pytest.fixture
def checkpointing(monkeypatch):
    """mlx-lm's grad_checkpoint, which changes a class for good, undone after the test."""

    def enable(model):
        kind = type(model.layers[0])
        monkeypatch.setattr(kind, "__call__", kind.__call__)
        trainer.grad_checkpoint(model.layers[0])

    return enable


@pytest.mark.parametrize("case", ["llama", "gemma3_text"])
@pytest.mark.parametrize(
    "is_compiled", [pytest.param(False, id="plain"), pytest.param(True, id="compiled", marks=pytest.mark.slow)]
)
def test_packed_rows_survive_mlx_lms_checkpointing(case, is_compiled, checkpointing):
    model = make(case)
    adapted_first(model)
    batch, lengths = tokens(2, 21), mx.array([[1, 20], [1, 20]])
    ids = mx.array([[0] * 6 + [1] * 15, [3] * 11 + [-1] * 10])
    expected = gradients(model, loss, batch, lengths, ids)
    checkpointing(model)
    if is_compiled:

        @partial(mx.compile, inputs=[model.state], outputs=[model.state])
        def step(*arguments):
            (value, _), found = nn.value_and_grad(model, loss)(model, *arguments)
            return value, dict(tree_flatten(found))

        found = step(batch, lengths, ids)
    else:
        found = gradients(model, loss, batch, lengths, ids)
    check_close(found[0], expected[0])
    check_gradients(found[1], expected[1])


@pytest.mark.parametrize("case", ["llama", "mixtral"])
@pytest.mark.parametrize("is_quantised", [False, True], ids=["float32", "quantised"])
def test_mlx_lms_files_are_the_same(case, is_quantised, tmp_path):
    model = make(case)
    config = vars(model.args) | {"architectures": ["any"]}
    if is_quantised:
        nn.quantize(model, 32, 4)
        config["quantization"] = {"group_size": 32, "bits": 4}
    logits = model(tokens(1, 9))
    names = [name for name, _ in tree_flatten(model.parameters())]
    patch(model)
    save_model(tmp_path, model)
    (tmp_path / "config.json").write_text(json.dumps(config))
    again, _ = load_model(tmp_path)
    assert [name for name, _ in tree_flatten(again.parameters())] == names
    assert mx.array_equal(again(tokens(1, 9)), logits).item()
    patch(again)
    again.load_weights(str(tmp_path / "model.safetensors"))
    unpatch(again)
    assert mx.array_equal(again(tokens(1, 9)), logits).item()


@pytest.mark.slow
def test_the_example_trains_the_same_adapters_with_and_without(tmp_path):
    script = Path(__file__).parents[2] / "scripts" / "examples" / "mlx_lm_lora.py"
    found = {}
    for option in ("--mask-prompt", "--no-patch"):
        folder = tmp_path / option.strip("-")
        command = [
            sys.executable,
            str(script),
            "--tiny",
            "--iters",
            "5",
            "--adapter-path",
            str(folder),
            "--mask-prompt",
        ]
        result = subprocess.run([*command, option], capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        assert "peak memory" in result.stdout
        assert ("kernels.flash_attention" in result.stdout) == (option != "--no-patch")
        found[option] = mx.load(str(folder / "adapters.safetensors"))
        assert json.loads((folder / "adapter_config.json").read_text())["fine_tune_type"] == "lora"
    patched, stock = found.values()
    assert patched.keys() == stock.keys()
    for name, array in stock.items():
        # Adam divides by gradients that are all but zero: what they are rounded to counts.
        assert mx.abs(patched[name] - array).max().item() <= 1e-2 * mx.abs(array).max().item(), name
