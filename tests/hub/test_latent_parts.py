"""DeepSeek-V3 as mlx-lm converts it, kv_b_proj cut in two: logits are mlx-lm's, and it is saved whole."""

import importlib
import json

from forge_mlx.hub.errors import HubError
from forge_mlx.hub.pretrained import load_pretrained, save_pretrained
from forge_mlx.models.qat import QATConfig, convert_qat, prepare_qat
from forge_mlx.nn.coded import Coded
from forge_mlx.nn.linear import Linear
import mlx.core as mx
import numpy as np
import pytest
from tiny_models import V, as_transformers_4, published, save

pytestmark = pytest.mark.slow

TOKENS = mx.array(np.random.default_rng(6).integers(0, V, (2, 24)))
YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
    **{"mscale": 1.0, "mscale_all_dim": 1.0},
}
# Groups of 32 fit into every matrix.
WIDE = {
    **{"kv_lora_rank": 64, "q_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 8, "v_head_dim": 32},
    **{"moe_intermediate_size": 32, "intermediate_size": 64, "rope_parameters": YARN},
}
FLOAT = "kv_b_proj of 3 layers was made floats: the codes are of its two parts"


def quiet(line: str) -> None:
    raise AssertionError(line)


def converted(folder, changes, **options):
    """A folder of transformers, and one that mlx-lm converted of it."""
    source = save(published("deepseek_v3", **changes), folder / "float")
    as_transformers_4(source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"dtype": config["torch_dtype"]}))
    convert = importlib.import_module("mlx_lm.convert").convert
    convert(str(source), str(folder / "theirs"), **{"dtype": "float32", **options})
    return source, folder / "theirs"


def in_codes(mode="affine", bits=4, group_size=32, predicate=None):
    return {
        **{"quantize": True, "q_mode": mode, "q_bits": bits, "q_group_size": group_size},
        "quant_predicate": predicate,
    }


def assert_same_logits(ours, folder, tolerance=1e-4):
    theirs, _ = importlib.import_module("mlx_lm.utils").load_model(folder)
    expected = np.array(theirs(TOKENS).astype(mx.float32))
    found = np.array(ours(TOKENS).astype(mx.float32))
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def test_floats_are_the_whole_matrix_to_the_bit(tmp_path):
    source, theirs = converted(tmp_path, {"rope_parameters": YARN})
    names = mx.load(str(theirs / "model.safetensors"))
    assert "model.layers.0.self_attn.embed_q.weight" in names
    assert not any("kv_b_proj" in name for name in names)
    whole, ours = load_pretrained(source, log=quiet).model, load_pretrained(theirs, log=quiet).model
    assert ours.config == whole.config
    for layer, want in zip(ours.layers, whole.layers, strict=True):
        assert mx.array_equal(layer.self_attn.kv_b_proj.weight, want.self_attn.kv_b_proj.weight)
    assert_same_logits(ours, theirs)


def eight_bits_of_keys(path, _module):
    if path.endswith("embed_q"):
        return {"group_size": 32, "bits": 8, "mode": "affine"}
    return not path.endswith("unembed_out")


CODES = {
    "affine": (WIDE, in_codes()),
    "affine of 8 bits": (WIDE, in_codes(bits=8)),
    "mxfp4": (WIDE, in_codes("mxfp4")),
    "nvfp4": (WIDE, in_codes("nvfp4", 4, 16)),
    "keys alone in codes": (WIDE, in_codes(predicate=eight_bits_of_keys)),
    "keys without groups": ({**WIDE, "qk_nope_head_dim": 24}, in_codes()),
}


@pytest.mark.parametrize("name", CODES)
def test_codes_of_the_two_parts(tmp_path, name):
    changes, options = CODES[name]
    _, folder = converted(tmp_path, changes, **options)
    lines = []
    opened = load_pretrained(folder, log=lines.append)
    assert [line.partition(": ")[2] for line in lines] == [FLOAT]
    attention = opened.model.layers[1].self_attn
    assert type(attention.kv_b_proj) is Linear
    assert isinstance(attention.q_b_proj, Coded)
    assert_same_logits(opened.model, folder)
    cache = opened.model.make_cache()
    tokens = mx.split(TOKENS, TOKENS.shape[1], axis=1)
    found = mx.concatenate([opened.model(token, cache) for token in tokens], axis=1)
    np.testing.assert_allclose(np.array(found), np.array(opened.model(TOKENS)), rtol=0, atol=1e-3)
    save_pretrained(tmp_path / "ours", opened.model, opened.tokenizer, source=opened.config, log=quiet)
    assert_same_logits(opened.model, tmp_path / "ours")
    again = load_pretrained(tmp_path / "ours", log=quiet)
    assert mx.array_equal(again.model(TOKENS), opened.model(TOKENS))


def test_sixteen_bits_are_those_that_mlx_decodes(tmp_path):
    _, folder = converted(tmp_path, WIDE, **in_codes(), dtype="bfloat16")
    opened = load_pretrained(folder, log=[].append)
    arrays = mx.load(str(folder / "model.safetensors"))

    def floats(part):
        names = (f"model.layers.1.self_attn.{part}.{each}" for each in ("weight", "scales", "biases"))
        return mx.dequantize(*(arrays[name] for name in names), group_size=32, bits=4)

    keys, values = floats("embed_q"), floats("unembed_out")
    for head, rows in enumerate(mx.split(opened.model.layers[1].self_attn.kv_b_proj.weight, 4)):
        assert rows.dtype == mx.bfloat16
        assert mx.array_equal(rows[:32], keys[head].T)
        assert mx.array_equal(rows[32:], values[head])


def test_parts_that_do_not_fit_together(tmp_path):
    _, folder = converted(tmp_path, {})
    file = str(folder / "model.safetensors")
    arrays = dict(mx.load(file))
    mx.eval(arrays)
    for name, wrong in (("embed_q", (4, 19, 12)), ("embed_q", (4,)), ("unembed_out", (4, 11, 20))):
        key = f"model.layers.1.self_attn.{name}.weight"
        mx.save_safetensors(file, {**arrays, key: mx.zeros(wrong)})
        with pytest.raises(HubError, match=r"1 that do not fit: layers\.1\.self_attn\.embed_q\.weight "):
            load_pretrained(folder, log=quiet)
    del arrays["model.layers.1.self_attn.embed_q.weight"]
    mx.save_safetensors(file, arrays)
    with pytest.raises(HubError, match=r"1 missing: layers\.1\.self_attn\.kv_b_proj\.weight, 1 that nothing needs: "):
        load_pretrained(folder, log=quiet)


def test_mlx_lm_computes_something_else_of_a_whole_in_codes_which_is_said(tmp_path):
    source, _ = converted(tmp_path, WIDE)
    for override, count in (({}, 3), ({"*.kv_b_proj": None}, 0)):
        opened = load_pretrained(source, log=quiet)
        overrides = {"lm_head": {"bits": 8}, **override}
        prepare_qat(opened.model, QATConfig(weights="affine", bits=4, group_size=32, overrides=overrides))
        convert_qat(opened.model)
        lines = []
        save_pretrained(tmp_path / f"{count}", opened.model, opened.tokenizer, log=lines.append)
        assert len(lines) == (1 if count else 0)
        if count:
            assert f"quantises both anew: there {count} layers compute something else" in lines[0]
        else:
            assert_same_logits(opened.model, tmp_path / "0")
