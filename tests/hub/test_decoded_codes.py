"""What a checkpoint has in codes and a model has as floats: routers, and kv_b_proj of which codes are cut in two."""

import json
from pathlib import Path
import shutil

from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.hub.errors import HubError
from forge_mlx.hub.pretrained import load_pretrained, save_pretrained
from forge_mlx.models.moe import MoE, MoEConfig
import mlx.core as mx
import numpy as np
import pytest
from tiny_tokenizer import write_tokenizer

V, WEIGHTS = 61, "model.safetensors"
SHAPE = {
    **{"vocab_size": V, "num_layers": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 32},
    **{"num_experts": 4, "experts_per_token": 2, "max_seq_len": 32, "tie_embeddings": False},
}
LATENT = {
    **{"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 8, "v_head_dim": 32, "latent_norm_eps": 1e-6},
    **{"router_scores": "sigmoid", "selection_bias": True},
}
ROUTER = "model.layers.1.block_sparse_moe.gate"
ATTENTION = "model.layers.1.self_attn"
OF_KEYS, OF_VALUES = f"{ATTENTION}.embed_q", f"{ATTENTION}.unembed_out"


def quiet(line: str) -> None:
    raise AssertionError(line)


def coded(name, weight, dtype):
    """The arrays of a matrix in codes of 4 bits, with scales in a dtype."""
    parts = mx.quantize(weight, group_size=32, bits=4)
    return {
        f"{name}.{part}": array.astype(dtype) if part != "weight" else array
        for part, array in zip(("weight", "scales", "biases"), parts, strict=True)
    }


def change(folder, **arrays):
    """Change the tensors of a folder; None removes one."""
    found = dict(mx.load(str(folder / WEIGHTS))) | arrays
    found = {name: array for name, array in found.items() if array is not None}
    mx.eval(found)
    mx.save_safetensors(str(folder / WEIGHTS), found)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A Mixtral with a router in codes, and a DeepSeek-V3 with kv_b_proj as mlx-lm cuts it; scales in bfloat16."""
    folder, found = tmp_path_factory.mktemp("codes"), {}
    write_tokenizer(folder, V)
    for name, changes in (("mixtral", {}), ("deepseek_v3", LATENT)):
        model = MoE(MoEConfig(**SHAPE, **changes), seed=1)
        found[name] = folder / name
        config = save_pretrained(found[name], model, HubTokenizer.load(folder), log=quiet)
        assert config["model_type"] == name
        config["quantization"] = {"group_size": 32, "bits": 4, "mode": "affine"}
        (found[name] / "config.json").write_text(json.dumps(config))
    router = mx.load(str(found["mixtral"] / WEIGHTS))[f"{ROUTER}.weight"]
    change(found["mixtral"], **coded(ROUTER, router, mx.bfloat16))
    whole = mx.load(str(found["deepseek_v3"] / WEIGHTS))[f"{ATTENTION}.kv_b_proj.weight"]
    of_keys, of_values = mx.split(whole.reshape(2, 64, 64), 2, axis=1)
    parts = coded(OF_KEYS, of_keys.swapaxes(1, 2), mx.bfloat16) | coded(OF_VALUES, of_values, mx.bfloat16)
    change(found["deepseek_v3"], **{f"{ATTENTION}.kv_b_proj.weight": None}, **parts)
    return found


@pytest.fixture
def folder(folders, tmp_path, request):
    return Path(shutil.copytree(folders[request.param], tmp_path / "model"))


def values_of(folder, module):
    """code * scale + bias in float64: what the codes stand for."""
    arrays = mx.load(str(folder / WEIGHTS))
    codes, scales, biases = (arrays[f"{module}.{part}"] for part in ("weight", "scales", "biases"))
    nibbles = (np.array(codes)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
    groups = nibbles.reshape(*scales.shape, 32).astype(np.float64)
    scales, biases = (np.array(each.astype(mx.float32), np.float64)[..., None] for each in (scales, biases))
    return (groups * scales + biases).reshape(*codes.shape[:-1], -1)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=["float32", "float16"])
def test_values_are_rounded_to_the_dtype_alone(folders, dtype):
    """Not to that of the scales first, which has 8 bits."""
    router = load_pretrained(folders["mixtral"], dtype=dtype, log=[].append).model.layers[1].mlp.router.weight
    latents = load_pretrained(folders["deepseek_v3"], dtype=dtype, log=[].append).model.layers[1].self_attn
    of_keys, of_values = (values_of(folders["deepseek_v3"], part) for part in (OF_KEYS, OF_VALUES))
    whole = np.concatenate([of_keys.swapaxes(1, 2), of_values], 1).reshape(128, 64)
    for found, want in ((router, values_of(folders["mixtral"], ROUTER)), (latents.kv_b_proj.weight, whole)):
        assert found.dtype == dtype
        step = np.finfo(np.float32).eps if dtype == mx.float32 else np.finfo(np.float16).eps
        error = np.abs(np.array(found.astype(mx.float32), np.float64) - want)
        assert error.max() <= step * np.abs(want).max()


DAMAGES = {
    "a router's biases": ("mixtral", f"{ROUTER}.biases", None, "layers.1.block_sparse_moe.gate.biases must be there "),
    "a router's scales": (
        "mixtral",
        f"{ROUTER}.scales",
        mx.ones((3, 2)),
        "layers.1.block_sparse_moe.gate: scales must have the shape (4, 2), of codes (4, 8), but got (3, 2).",
    ),
    "codes of a scalar": (
        "mixtral",
        f"{ROUTER}.weight",
        mx.array(1, mx.uint32),
        "layers.1.block_sparse_moe.gate: codes must be a uint32 weight with scales but",
    ),
    "heads of keys": (
        "deepseek_v3",
        f"{OF_KEYS}.weight",
        mx.zeros((1, 64, 4), mx.uint32),
        "layers.1.self_attn.embed_q: scales must have the shape (1, 64, 1), of codes (1, 64, 4), but got (2, 64, 1).",
    ),
    "biases of values": ("deepseek_v3", f"{OF_VALUES}.biases", None, "layers.1.self_attn.unembed_out.biases must be t"),
}


@pytest.mark.parametrize(("folder", "damage"), [(DAMAGES[name][0], name) for name in DAMAGES], indirect=["folder"])
def test_damaged_codes_are_named(folder, damage):
    _, name, array, message = DAMAGES[damage]
    change(folder, **{name: array})
    with pytest.raises(HubError) as caught:
        load_pretrained(folder, log=[].append)
    text = str(caught.value)
    assert text.startswith(f"{folder}")
    assert message in text
    assert "\n" not in text
