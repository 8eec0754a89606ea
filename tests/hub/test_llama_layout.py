"""What the folder says, and what is refused; that mlx-lm and transformers open it is in test_llama_export.py."""

import json
import resource

from forge_mlx.hub.save import save_pretrained
from forge_mlx.models.gpt import GPTConfig
from forge_mlx.models.moe import MoEConfig
from forge_mlx.models.qat import QATConfig, convert_qat, prepare_qat
from forge_mlx.models.registry import build_model
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
import numpy as np
import pytest
from tiny_bpe import tiny_bpe

SHAPE = {"vocab_size": 300, "num_layers": 2, "hidden_size": 64, "num_heads": 2, "num_kv_heads": 1, "max_seq_len": 32}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_bpe()


def gpt(**changes):
    return build_model(GPTConfig.model_validate(SHAPE | changes), seed=1)


def moe(**changes):
    return build_model(MoEConfig.model_validate(SHAPE | {"num_experts": 3} | changes), seed=1)


def qat(model, **settings):
    return convert_qat(prepare_qat(model, QATConfig.model_validate(settings)))


def read(folder, name):
    return json.loads((folder / name).read_text(encoding="utf-8"))


def refusal(tmp_path, model, tokenizer):
    with pytest.raises(ValueError, match=r"^\[save_pretrained\] ") as caught:
        save_pretrained(tmp_path / "out", model, tokenizer)
    assert not (tmp_path / "out").exists()
    return str(caught.value)


def test_a_llama(tmp_path, tokenizer):
    model = gpt(bias=True, rope_scale=0.25, rope_base=5e4, norm_eps=1e-6, tie_embeddings=False, head_dim=16)
    config = save_pretrained(tmp_path / "deep/out", model, tokenizer)
    folder = tmp_path / "deep/out"
    assert sorted(file.name for file in folder.iterdir()) == [
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    ]
    assert read(folder, "config.json") == config
    assert config == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 300,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 192,
        "hidden_act": "silu",
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e4,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": None,
        "dtype": "float32",
    }
    assert read(folder, "generation_config.json") == {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": None}
    arrays = mx.load(str(folder / "model.safetensors"))
    ours = dict(nn.utils.tree_flatten(model.parameters()))
    assert arrays.keys() == {name if name.startswith("lm_head") else f"model.{name}" for name in ours}
    for name, array in arrays.items():
        np.testing.assert_array_equal(np.array(array), np.array(ours[name.removeprefix("model.")]), err_msg=name)


def test_the_end_token_at_the_beginning(tmp_path, tokenizer):
    config = save_pretrained(tmp_path, gpt(), tokenizer, texts_begin_with_end=True)
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 1)
    assert read(tmp_path, "generation_config.json")["bos_token_id"] == 1
    assert read(tmp_path, "tokenizer_config.json")["bos_token"] == "</s>"


@pytest.mark.parametrize(
    ("build", "changes", "said"),
    [
        (gpt, {}, {"model_type": "llama", "head_dim": 32, "rope_scaling": None, "mlp_bias": False}),
        (gpt, {"qk_norm": True}, {"model_type": "qwen3", "attention_bias": False}),
        (moe, {}, {"model_type": "mixtral", "num_local_experts": 3, "intermediate_size": 192}),
        (moe, {"expert_intermediate_size": 8}, {"model_type": "mixtral", "intermediate_size": 8}),
        (
            moe,
            {
                **{"qk_norm": True, "dense_layers": 1, "intermediate_size": 96, "expert_intermediate_size": 8},
                **{"normalize_gates": False, "experts_per_token": 1, "aux_loss_weight": 0.01},
            },
            {
                **{
                    "model_type": "qwen3_moe",
                    "mlp_only_layers": [0],
                    "decoder_sparse_step": 1,
                    "norm_topk_prob": False,
                },
                **{"num_experts": 3, "num_experts_per_tok": 1, "intermediate_size": 96, "moe_intermediate_size": 8},
                "router_aux_loss_coef": 0.01,
            },
        ),
    ],
    ids=["llama", "qwen3", "mixtral", "mixtral of narrow experts", "qwen3_moe"],
)
def test_which_layout(tmp_path, tokenizer, build, changes, said):
    config = save_pretrained(tmp_path, build(**changes), tokenizer)
    assert {key: config[key] for key in said} == said


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
def test_numbers_stay_what_they_are(tmp_path, tokenizer, dtype):
    model = gpt()
    model.update(tree_map(lambda array: array.astype(dtype), model.parameters()))
    assert f"mlx.core.{save_pretrained(tmp_path, model, tokenizer)['dtype']}" == str(dtype)
    assert {array.dtype for array in mx.load(str(tmp_path / "model.safetensors")).values()} == {dtype}


def test_every_field_that_does_not_fit_is_named(tmp_path, tokenizer):
    model = gpt(
        **{"norm": "layer_norm", "norm_weight": False, "position": "learned", "sliding_window": 8, "mlp": "relu2"},
        **{"attention_softcap": 50.0, "attention_sinks": True, "token_shift": True, "logit_softcap": 30.0},
        **{"qk_norm": "joint", "bias": True},
    )
    assert refusal(tmp_path, model, tokenizer) == (
        "[save_pretrained] the model must be one of a published family but from the nearest, qwen3, it differs in "
        "norm: layer_norm (must be rms_norm); norm_weight: False (must be True); position: learned (must be rope); "
        "attention_softcap: 50.0 (must be None); attention_sinks: True (must be False); token_shift: True (must be "
        "False); mlp: relu2 (must be swiglu); bias: True (must be False); mlp_bias: True (must be False); qk_norm: "
        "joint (must be True); logit_softcap: 30.0 (must be None). "
        "Train with other settings, or keep forge_mlx's own folder."
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"mlp": "geglu"}, "mlp: geglu (must be swiglu). Train"),
        ({"position": "none"}, "position: none (must be rope). Train"),
    ],
    ids=["geglu", "no positions"],
)
def test_a_field_alone(tmp_path, tokenizer, changes, problem):
    assert problem in refusal(tmp_path, gpt(**changes), tokenizer)


def test_experts_that_no_layout_has(tmp_path, tokenizer):
    model = moe(
        **{"router_scores": "sigmoid", "routed_scaling": 2.0, "shared_experts": 1, "num_experts": 4},
        **{"expert_groups": 2, "groups_per_token": 2, "selection_bias": True, "bias_rate": 0.1, "rope_scale": 0.5},
        **{"normalize_gates": False, "dense_layers": 1, "head_dim": 16},
    )
    message = refusal(tmp_path, model, tokenizer)
    assert "from the nearest, dots1, it differs in qk_norm: False (must be True). Train" in message


def test_formats_of_modules(tmp_path, tokenizer):
    overrides = {
        "embed_tokens": {"bits": 8},
        "layers.1.mlp.down_proj": {"weights": "mxfp4"},
        "layers.0.self_attn.q_proj": {"weights": "ternary"},
        "layers.1.self_attn.*": None,
    }
    model = qat(gpt(), bits=4, group_size=64, overrides=overrides)
    config = save_pretrained(tmp_path, model, tokenizer)
    assert config["quantization"] == {
        "group_size": 64,
        "bits": 4,
        "mode": "affine",
        "model.embed_tokens": {"group_size": 64, "bits": 8, "mode": "affine"},
        "model.layers.0.self_attn.q_proj": {"group_size": 64, "bits": 2, "mode": "affine"},
        "model.layers.1.mlp.down_proj": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    }
    assert config["quantization_config"] == config["quantization"]
    arrays = mx.load(str(tmp_path / "model.safetensors"))
    assert "model.layers.1.self_attn.q_proj.scales" not in arrays
    codes = model.layers[0].mlp.up_proj
    for name in ("weight", "scales", "biases"):
        assert mx.array_equal(arrays[f"model.layers.0.mlp.up_proj.{name}"], codes[name])


def test_a_prepared_model_is_refused(tmp_path, tokenizer):
    message = refusal(tmp_path, prepare_qat(gpt(), QATConfig()), tokenizer)
    assert message.endswith("but embed_tokens and 14 more are fake-quantised. Call convert_qat first.")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"weights": "int8", "modules": ["*.up_proj"]}, "layers.0.mlp.up_proj: a CodesLinear (int8)"),
        ({"weights": "fp8_e4m3", "modules": ["embed_tokens"]}, "has embed_tokens: a CodesEmbedding (fp8_e4m3). Train"),
        (
            {"activations": "int8", "modules": ["layers.1.*"]},
            "layers.1.self_attn.o_proj: inputs in int8 and 3 more. Train",
        ),
    ],
    ids=["int8", "fp8 table", "inputs"],
)
def test_formats_that_mlx_has_not(tmp_path, tokenizer, settings, problem):
    message = refusal(tmp_path, qat(gpt(), **settings), tokenizer)
    assert problem in message
    assert (
        "Train with weights affine, mxfp4, mxfp8, nvfp4 or ternary, and without activations; a checkpoint from before "
        "qat.start_step is exported as a float model. Fuse" in message
    )


def test_layers_of_other_kinds(tmp_path, tokenizer):
    class Doubled(nn.Linear):
        def __call__(self, x):
            return 2 * super().__call__(x)

    model = gpt()
    model.layers[0].mlp.up_proj = Doubled(64, 192, bias=False)
    model.layers[1].self_attn.q_proj = nn.Sequential(nn.Linear(64, 64, bias=False))
    message = refusal(tmp_path, model, tokenizer)
    for problem in (
        "layers.1.self_attn.q_proj missing",
        "layers.0.mlp.up_proj: a Doubled",
        "layers.1.self_attn.q_proj.layers.0: a Linear",
    ):
        assert problem in message
    assert "Train" not in message


def test_a_tokenizer_of_another_model(tmp_path, tokenizer):
    message = refusal(tmp_path, gpt(vocab_size=299), tokenizer)
    assert "must be the model's, of at most 299 tokens, but has 300." in message


def test_a_larger_vocabulary_than_the_tokenizers_is_kept(tmp_path, tokenizer):
    assert save_pretrained(tmp_path, gpt(vocab_size=320), tokenizer)["vocab_size"] == 320


@pytest.mark.parametrize("what", ["folder", "file"])
def test_nothing_is_overwritten(tmp_path, tokenizer, what):
    out = tmp_path / "out"
    if what == "folder":
        out.mkdir()
        (out / "model-old.safetensors").touch()
    else:
        out.touch()
    with pytest.raises(
        ValueError, match=r"\[save_pretrained\] folder must be new or empty but got .*/out\. Give another"
    ):
        save_pretrained(out, gpt(), tokenizer)


def test_a_full_disk_leaves_no_model(tmp_path, tokenizer):
    # The limit on a file's size makes the kernel itself refuse the write, as a full disk does.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_pretrained(tmp_path, gpt(), tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "config.json").exists()
