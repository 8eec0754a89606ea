"""GGUF files of mixtures of experts load here with transformers' logits, and llama.cpp opens those written here."""

from forge_mlx.hub.errors import HubError
from forge_mlx.hub.gguf import load_gguf
from forge_mlx.hub.gguf_keys import config_keys
from forge_mlx.hub.gguf_write import write_gguf
from forge_mlx.hub.pretrained import load_pretrained, read_shape, save_pretrained
from forge_mlx.models.moe import MoE, MoEConfig
from forge_mlx.models.qat import QATConfig, convert_qat, prepare_qat
from forge_mlx.nn.quantized import QuantizedExpertLinear
import gguf
from gguf_checks import TOKENS, assert_close, contents, logits, quiet, their_logits
from gguf_experts_oracle import CONFIGS, is_in_blocks, published, write_gguf_of
from gguf_oracle import V
from llama_cpp import ask
import mlx.core as mx
from mlx.utils import tree_flatten
import numpy as np
import pytest
import torch

FAMILIES = {"llama": "mixtral", "olmoe": "olmoe", "qwen3moe": "qwen3_moe", "dots1": "dots1"}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers_and_the_file_is_written_again(tmp_path, name):
    theirs = published(name)
    file = write_gguf_of(tmp_path / "model.gguf", theirs, name)
    loaded = load_gguf(file, log=quiet)
    assert (loaded.family, type(loaded.model)) == (FAMILIES[name], MoE)
    assert_close(logits(loaded.model), their_logits(theirs))

    write_gguf(tmp_path / "again.gguf", loaded.model, loaded.tokenizer, kind="f32")
    values, tensors = contents(tmp_path / "again.gguf")
    wanted_values, wanted_tensors = contents(file)
    for key, value in wanted_values.items():
        # The width of dense layers, of which qwen3moe has none.
        if key != "qwen3moe.feed_forward_length":
            assert values[key] == (pytest.approx(value) if isinstance(value, float) else value), key
    assert tensors.keys() == wanted_tensors.keys()
    for key, (kind, shape, data) in wanted_tensors.items():
        assert tensors[key][:2] == (kind, shape), key
        np.testing.assert_array_equal(tensors[key][2], data, err_msg=key)


@pytest.mark.parametrize(("name", "count"), [("llama", 5), ("llama", 1), ("qwen3moe", 6)])
def test_the_gate_of_a_single_expert_is_1(tmp_path, name, count):
    theirs = published(name, num_local_experts=count, num_experts_per_tok=1)
    loaded = load_gguf(write_gguf_of(tmp_path / "model.gguf", theirs, name), log=quiet)
    assert (loaded.model.config.num_experts, loaded.model.config.experts_per_token) == (count, 1)
    assert_close(logits(loaded.model), their_logits(theirs))
    write_gguf(tmp_path / "again.gguf", loaded.model, loaded.tokenizer, kind="f32")
    assert_close(logits(load_gguf(tmp_path / "again.gguf", log=quiet).model), their_logits(theirs))


def dequantized(model, kind):
    """transformers' model with the values of matrices that were in blocks."""
    number = gguf.GGMLQuantizationType[kind]
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1 and not key.endswith("mlp.gate.weight"):
                rows = parameter.numpy()
                values = gguf.dequantize(gguf.quantize(rows, number), number).reshape(rows.shape)
                parameter.copy_(torch.from_numpy(values))
    return model


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", "Q4_0"),
        ("dots1", "Q8_0"),
        *(pytest.param(name, "Q4_1", marks=pytest.mark.slow) for name in CONFIGS),
        *(pytest.param("qwen3moe", kind, marks=pytest.mark.slow) for kind in ("F16", "BF16", "Q5_0", "Q5_1")),
    ],
)
def test_codes_of_experts_compute_what_they_stand_for(tmp_path, name, kind):
    file = write_gguf_of(tmp_path / "model.gguf", published(name), name, kind=kind)
    expected = their_logits(dequantized(published(name), kind))
    loaded = load_gguf(file, dtype=mx.float32, log=quiet)
    assert_close(logits(loaded.model), expected)
    coded = [module for _, module in loaded.model.named_modules() if isinstance(module, QuantizedExpertLinear)]
    assert len(coded) == (0 if "F" in kind else 6)
    floats = load_gguf(file, dtype=mx.float32, keep_quantized=False, log=quiet)
    assert_close(logits(floats.model), expected)


def test_without_a_dtype_weights_are_what_matrices_have_and_what_steers_routers_is_float32(tmp_path):
    theirs = published("dots1")
    for kind, dtype in {"BF16": mx.bfloat16, "Q8_0": mx.float16}.items():
        model = load_gguf(write_gguf_of(tmp_path / f"{kind}.gguf", theirs, "dots1", kind=kind), log=quiet).model
        router = model.layers[1].mlp.router
        assert router.weight.dtype == dtype
        bias = theirs.model.layers[1].mlp.gate.e_score_correction_bias.numpy()
        np.testing.assert_array_equal(np.array(router.selection_bias), bias)
        floats = {array.dtype for name, array in tree_flatten(model.parameters()) if "selection" not in name}
        assert floats - {mx.uint32} == {dtype}


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_blocks_of_experts_are_those_of_ggml_s_reference(tmp_path, kind):
    model = load_gguf(write_gguf_of(tmp_path / "model.gguf", published("dots1"), "dots1"), log=quiet)
    counts = write_gguf(tmp_path / "coded.gguf", model.model, model.tokenizer, kind=kind)
    assert counts == ({"Q8_0": 29, "F32": 17} if kind == "q8_0" else {"Q8_0": 2, "Q4_0": 27, "F32": 17})
    _, floats = contents(tmp_path / "model.gguf")
    _, tensors = contents(tmp_path / "coded.gguf")
    for name, (stored, _, data) in tensors.items():
        expected = floats[name][2]
        assert (stored != "F32") == is_in_blocks(name, expected), name
        if stored != "F32":
            expected = gguf.quantize(expected, gguf.GGMLQuantizationType[stored])
        np.testing.assert_array_equal(data, expected, err_msg=name)


def test_codes_of_experts_that_were_trained_are_written_as_they_are(tmp_path):
    shape = {"vocab_size": V, "num_layers": 1, "hidden_size": 64, "num_heads": 4, "expert_intermediate_size": 32}
    settings = QATConfig(weights="affine", bits=4, group_size=32)
    # Scales of float16 are what Q4_1 holds.
    model = convert_qat(prepare_qat(MoE(MoEConfig(**shape, num_experts=3), seed=3), settings), mx.float16).eval()
    source = load_gguf(write_gguf_of(tmp_path / "source.gguf", published("llama"), "llama"), log=quiet)
    counts = write_gguf(tmp_path / "model.gguf", model, source.tokenizer, kind="q4_0")
    assert counts["Q4_1"] == 8
    found = dict(tree_flatten(load_gguf(tmp_path / "model.gguf", log=quiet).model.parameters()))
    for name, array in tree_flatten(model.parameters()):
        if "proj" in name:
            assert found[name].dtype == array.dtype
            assert mx.array_equal(found[name], array), name


def test_a_model_of_a_file_is_saved_as_a_folder(tmp_path):
    loaded = load_pretrained(write_gguf_of(tmp_path / "model.gguf", published("qwen3moe"), "qwen3moe"), log=quiet)
    folder = tmp_path / "folder"
    save_pretrained(folder, loaded.model, loaded.tokenizer, source=loaded.config, generation=loaded.generation)
    again = load_pretrained(folder, log=quiet)
    assert again.model.config == read_shape(tmp_path / "model.gguf")
    assert mx.array_equal(again.model(mx.array(TOKENS)), loaded.model(mx.array(TOKENS)))


WRONG = {
    "no count": ("llama", {"expert_count": None}, {}, r"the metadata must have llama\.expert_count but does not"),
    "no experts": (
        "llama",
        {"expert_count": 0},
        {},
        r"llama\.expert_count must be 5, the rows of blk\.0\.ffn_gate_inp",
    ),
    "fewer experts": ("olmoe", {"expert_count": 4}, {}, r"olmoe\.expert_count must be 6, the rows of .* but got 4"),
    "many used": (
        "qwen3moe",
        {"expert_used_count": 7},
        {},
        r"expert_used_count must be 1 to .*expert_count, 6, but got 7",
    ),
    "none used": (
        "llama",
        {"expert_used_count": 0},
        {},
        r"expert_used_count must be 1 to .*expert_count, 5, but got 0",
    ),
    "used is missing": ("llama", {"expert_used_count": None}, {}, r"must have llama\.expert_used_count but does not"),
    "no router": (
        "llama",
        {},
        {"blk.0.ffn_gate_inp.weight": None},
        r"blk\.0\.ffn_gate_inp\.weight, which chooses among experts, must be there",
    ),
    "stacks of fewer": (
        "llama",
        {},
        {"blk.1.ffn_up_exps.weight": np.zeros((4, 96, 64), np.float32)},
        r"blk\.1\.ffn_up_exps\.weight has the shape \(4, 96, 64\), which gives no .*up_proj\.weight of \(5, 96, 64\)",
    ),
    "an expert is missing": (
        "dots1",
        {},
        {"blk.2.ffn_down_exps.weight": None},
        r"the tensors fit no dots1: blk\.2\.ffn_down_exps\.weight is missing",
    ),
    "another width": (
        "dots1",
        {"expert_feed_forward_length": 16},
        {},
        r"the tensors fit no dots1: .*_exps\.weight has",
    ),
    "no width": ("dots1", {"expert_feed_forward_length": 0}, {}, r"expert_feed_forward_length must be .* but got 0"),
    "absurd sharing": (
        "dots1",
        {"expert_shared_count": 2**31},
        {},
        r"expert_shared_count must be .* but got 2147483648",
    ),
    "all layers dense": ("dots1", {"leading_dense_block_count": 3}, {}, r"blk\.3\.ffn_gate_inp\.weight, which chooses"),
    "another choice": ("dots1", {"expert_gating_func": 3}, {}, r"gating_func must be 1 \(softmax\) or 2 .* but got 3"),
    "softmax": ("dots1", {"expert_gating_func": 1}, {}, r"router_scores must be sigmoid, .* in dots1, .* says softmax"),
    "factor": ("olmoe", {"expert_weights_scale": 2.5}, {}, r"routed_scaling must be 1\.0, .* in olmoe, .* says 2\.5"),
    "gates": ("qwen3moe", {"expert_weights_norm": False}, {}, r"normalize_gates must be True, .* says False"),
    "no such groups": ("dots1", {"expert_group_count": 3}, {}, r"the metadata describes no model: .*expert_groups"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_experts_give_one_clear_line(tmp_path, name):
    architecture, changes, tensors, said = WRONG[name]
    model = published(architecture)
    file = write_gguf_of(tmp_path / "wrong.gguf", model, architecture, changes=changes, tensors=tensors)
    with pytest.raises(HubError, match=said) as caught:
        load_gguf(file)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_bias": True}, "attention_bias: True"),
        ({"routed_scaling": 2.0}, "routed_scaling: 2.0"),
        ({"qk_norm": True, "normalize_gates": False}, "normalize_gates: False"),
        ({"qk_norm": True, "expert_groups": 4}, "expert_groups: 4"),
        ({"qk_norm": "joint", "normalize_gates": False, "num_kv_heads": 2}, "num_kv_heads: 2 (must be 4)"),
        ({"qk_norm": "joint", "normalize_gates": False, "head_dim": 8}, "head_dim: 8 (must be 16)"),
        ({"qk_norm": "joint", "normalize_gates": False}, "tie_embeddings: True"),
        ({"qk_norm": "joint", "tie_embeddings": False}, "normalize_gates: True"),
        ({"dense_layers": 1, "qk_norm": True}, "router_scores: softmax (must be sigmoid); selection_bias: False"),
        ({"qk_norm": True, "router_scores": "sigmoid", "selection_bias": True}, "shared_experts: 0"),
        ({"sliding_window": 8}, "sliding_window: 8"),
    ],
)
def test_what_llama_cpp_would_not_compute_is_refused(changes, said):
    config = MoEConfig(**{"vocab_size": V, "hidden_size": 64, "num_heads": 4} | changes)
    with pytest.raises(HubError, match=r"must be one that llama.cpp's") as caught:
        config_keys(config)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_of_latent_attention_one_line_says_that_it_is_not_written():
    latent = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    routing = {"router_scores": "sigmoid", "selection_bias": True, "shared_experts": 1, "dense_layers": 1}
    config = MoEConfig(vocab_size=V, hidden_size=64, num_heads=4, **latent, **routing)
    with pytest.raises(HubError, match=r"latent attention \(kv_lora_rank: 16\), .* deepseek2 is not written") as caught:
        config_keys(config)
    assert "dots1" not in str(caught.value)


@pytest.mark.parametrize("layers", [1, 3])
def test_modules_are_listed_as_often_whatever_their_number(tmp_path, monkeypatch, layers):
    source = load_gguf(write_gguf_of(tmp_path / "model.gguf", published("llama"), "llama"), log=quiet)
    shape = {"vocab_size": V, "hidden_size": 64, "num_heads": 4, "expert_intermediate_size": 32}
    model, calls = MoE(MoEConfig(**shape, num_layers=layers), seed=3), []
    listed = MoE.named_modules
    monkeypatch.setattr(MoE, "named_modules", lambda self: calls.append(self) or listed(self))
    write_gguf(tmp_path / "ours.gguf", model, source.tokenizer, kind="f16")
    assert len([each for each in calls if each is model]) <= 3


def greedy(model, prompts, count):
    """The likeliest next tokens of prompts `[N, T]`, `[N, count]`, and before each the log-probabilities of all."""
    rows, steps = mx.array(prompts), []
    for _ in range(count):
        values = model(rows)[:, -1].astype(mx.float32)
        steps.append(values - mx.logsumexp(values, axis=-1, keepdims=True))
        rows = mx.concatenate([rows, steps[-1].argmax(-1, keepdims=True).astype(rows.dtype)], axis=-1)
    return np.array(rows[:, -count:]), np.array(mx.stack(steps, axis=1))


def are_steady(model, prompts, log_probs, noise):
    """Whether each prompt keeps its log-probabilities when embeddings are rounded: no other experts are chosen."""
    table, moved = model.embed_tokens.weight, np.zeros(len(prompts))
    for seed in range(3):
        drawn = np.random.default_rng(seed).normal(0, noise, table.shape).astype(np.float32)
        model.embed_tokens.weight = table * (1 + mx.array(drawn))
        found = greedy(model, prompts, log_probs.shape[1])[1]
        moved = np.maximum(moved, np.abs(found - log_probs).max((1, 2)))
    model.embed_tokens.weight = table
    return moved < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("name", CONFIGS)
def test_llama_cpp_continues_as_the_model_does(tmp_path, name, kind):
    source = load_gguf(write_gguf_of(tmp_path / "model.gguf", published(name), name), log=quiet)
    write_gguf(tmp_path / "ours.gguf", source.model, source.tokenizer, kind=kind)
    # Of what was rounded the tokens must agree, not with what there was before.
    ours = load_gguf(tmp_path / "ours.gguf", dtype=mx.float32, keep_quantized=False, log=quiet)
    # llama.cpp rounds the activations too, to float16, or to 8 bits before a product with codes.
    count, tolerance, noise = {"f32": (3, 1e-3, 1e-4), "f16": (3, 0.02, 1e-3)}.get(kind, (1, 0.3, 0.02))
    prompts = np.random.default_rng(3).integers(3, V - 1, (250, 12))
    tokens, log_probs = greedy(ours.model, prompts, count)
    # An answer that is no whole character is left out, and rounding must not decide which token is likeliest.
    shown = [token for token in range(3, V) if ours.tokenizer.token_to_bytes(token).strip().isalnum()]
    margins = np.diff(np.sort(log_probs)[..., -2:])[..., 0].min(-1)
    is_clear = np.isin(tokens, shown).all(-1) & (margins > 2 * tolerance)
    chosen = np.flatnonzero(is_clear & are_steady(ours.model, prompts, log_probs, noise))[:3]
    assert len(chosen) == 3
    answers = ask(tmp_path / "ours.gguf", prompts[chosen].tolist(), count)
    for at, answer in zip(chosen, answers, strict=True):
        assert [max(top, key=top.get) for top in answer.top] == tokens[at].tolist()
        for top, row in zip(answer.top, log_probs[at], strict=True):
            assert len(top) == 20
            assert max(abs(value - row[token]) for token, value in top.items()) < tolerance


def test_an_architecture_that_is_not_read_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "deepseek2")
    writer.add_tensor("token_embd.weight", np.zeros((V, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(HubError, match=r"must be one of llama, .*, dots1 but got 'deepseek2'"):
        load_gguf(tmp_path / "model.gguf")


def test_experts_in_an_architecture_that_has_none_are_refused(tmp_path):
    file = write_gguf_of(tmp_path / "model.gguf", published("llama"), "llama")
    file.write_bytes(file.read_bytes().replace(b"llama", b"qwen3"))
    with pytest.raises(HubError, match=r"qwen3\.expert_count must be 0 but got 5: experts are read in llama, olmoe"):
        load_gguf(file)
