"""What is said where adapters are merged into codes: of what is lost, and nothing where nothing is."""

from forge_mlx.hub.merged import merge_for_gguf, merge_for_saving
from forge_mlx.models.adapter_config import AdapterConfig
from forge_mlx.models.adapters import adapted_layers, add_adapters
from forge_mlx.models.gpt import GPT, GPTConfig
from forge_mlx.models.qat import QATConfig, convert_qat, prepare_qat
import mlx.core as mx
import numpy as np
import pytest

CODES = QATConfig(bits=4, group_size=32)
LAYER = "layers.0.mlp.up_proj"


def adapted(qat):
    """A model of codes with adapters that move its weights."""
    config = GPTConfig(vocab_size=32, num_layers=1, hidden_size=32, num_heads=1, max_seq_len=8)
    model = convert_qat(prepare_qat(GPT(config, seed=0), CODES))
    add_adapters(model, AdapterConfig(rank=2), seed=0, qat=qat)
    mx.random.seed(1)
    for _, layer in adapted_layers(model):
        layer.lora_b = mx.random.normal(layer.lora_b.shape) * 0.1
    return model


def layer_of(model):
    return dict(model.named_modules())[LAYER]


@pytest.mark.parametrize("way", ["folder", "gguf"])
@pytest.mark.parametrize("qat", [None, CODES], ids=["adapters", "trained quantised"])
def test_codes_that_were_trained_are_not_said_to_be_rounded(way, qat):
    model, said = adapted(qat), []
    trained = np.array(layer_of(model).effective_weight())
    number = len(adapted_layers(model))
    if way == "folder":
        merge_for_saving(model, dequantize=False, log=said.append)
    else:
        merge_for_gguf(model, "q4_0", dequantize=False, log=said.append)
    lost = "codes are made anew of the sum, which rounds away part of what was learned"
    assert [line.split(";")[0] for line in said] == ([] if qat else [f"{number} layers of codes with adapters: {lost}"])
    assert np.array_equal(np.array(layer_of(model).effective_weight()), trained) == (qat is not None)
