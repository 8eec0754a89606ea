"""Faults of a model folder: how each is made, and what is said of it, `{f}` the folder, `{c}` config, `{w}` weights."""

import os

from broken_folders import (
    Q_PROJ,
    WEIGHTS,
    cut,
    edit,
    entry,
    link,
    only,
    raw,
    repeat_in_both,
    shard,
    tensors,
    without_index,
)
import mlx.core as mx

ROPE = {"rope_type": "dynamic", "factor": 2.0}
FAULTS = {
    "no config": (
        lambda f: (f / "config.json").unlink(),
        "{f}: must hold config.json but does not. Is it a model folder?",
    ),
    "config cut short": (lambda f: cut(f, "config.json", 40), "{c}: must be JSON but is damaged: "),
    "config of a list": (lambda f: (f / "config.json").write_text("[]"), "{c}: must be a JSON object but is a list."),
    "config with a key twice": (
        lambda f: (f / "config.json").write_text('{"model_type": "llama", "model_type": "gpt2"}'),
        "{c}: must be JSON but is damaged: the key 'model_type' is there twice.",
    ),
    "no model_type": (
        lambda f: edit(f, model_type=...),
        "{c}: model_type must name a family but is missing. Is it a H",
    ),
    "unknown model_type": (
        lambda f: edit(f, model_type="lama"),
        "{c}: model_type must be among llama, qwen3, qwen2, mistral, gemma3_text, gemma2, gpt2, mixtral, qwen3_moe, "
        "olmoe, dots1, deepseek_v3, gemma3 but got 'lama'. The nearest is llama.",
    ),
    "gemma3 without text": (
        lambda f: edit(f, model_type="gemma3"),
        "{c}: text_config must be an object in a gemma3 but",
    ),
    "other activation": (
        lambda f: edit(f, hidden_act="relu"),
        "{c}: hidden_act must be 'silu' or 'swish' but got 'relu'",
    ),
    "other rotation": (
        lambda f: edit(f, rope_scaling=ROPE),
        "{c}: rope_scaling: rope_type must be among default, linear",
    ),
    "partial rotation": (
        lambda f: edit(f, partial_rotary_factor=0.5),
        "{c}: partial_rotary_factor must be 1.0 but got 0",
    ),
    "rotation without a factor": (
        lambda f: edit(f, rope_scaling={"type": "linear"}),
        "{c}: rope_scaling: factor must be a number of 1 or more but got None.",
    ),
    "a base of 0": (
        lambda f: edit(f, rope_theta=0),
        "{c}: rope_theta must be a finite number above 1 but got 0.0.",
    ),
    "a base of 0 among the parameters": (
        lambda f: edit(f, rope_theta=..., rope_scaling=None, rope_parameters={"rope_theta": 0}),
        "{c}: rope_parameters: rope_theta must be a finite number above 1 but got 0.0.",
    ),
    "rotation that is no object": (lambda f: edit(f, rope_scaling=2), "{c}: rope_scaling must be an object but got 2."),
    "no hidden_size": (lambda f: edit(f, hidden_size=...), "{c}: hidden_size must be there but is missing."),
    "vocab_size in words": (lambda f: edit(f, vocab_size="many"), "{c}: vocab_size: Input should be a valid integer."),
    "heads that do not divide": (
        lambda f: edit(f, num_key_value_heads=3),
        "{c}: num_heads must be a multiple of num_kv_heads, 3, but got 4. Change one of them; null takes as many",
    ),
    "layer_types of other kinds": (
        lambda f: edit(f, model_type="qwen3", layer_types=["linear_attention"] * 2),
        "{c}: layer_types must be sliding_attention or full_attention for each of 2 layers but got ['linear_att",
    ),
    "generation_config cut short": (lambda f: cut(f, "generation_config.json", 9), "generation_config.json"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "must have a tokenizer.json but has none."),
    "tokenizer cut short": (lambda f: cut(f, "tokenizer.json", 99), "tokenizer.json of {f} must be "),
    "no weights": (
        lambda f: (f / WEIGHTS).unlink(),
        "{f}: must hold model.safetensors or model.safetensors.index.json",
    ),
    "only a pickle": (
        lambda f: only(f, "pytorch_model.bin"),
        "{f}: must hold model.safetensors or model.safetensors.index.json but has only pytorch_model.bin, a pickle, "
        "which can run code and is not read. Get the safetensors of it.",
    ),
    "only a GGUF file": (lambda f: only(f, "model.gguf"), " but has model.gguf. Give that file itself."),
    "weights cut short": (lambda f: cut(f, WEIGHTS, 20_000), "{w}: must end with "),
    "weights cut in the header": (
        lambda f: cut(f, WEIGHTS, 500),
        "{w}: must be a safetensors file but has 500 bytes and",
    ),
    "empty weights": (
        lambda f: cut(f, WEIGHTS, 0),
        "{w}: must be a safetensors file but has 0 bytes and a header of 0",
    ),
    "header of 2^63 bytes": (
        lambda f: raw(f, {}, length=1 << 63),
        "{w}: must be a safetensors file but has 10 bytes and",
    ),
    "header that is no JSON": (lambda f: raw(f, b"not JSON"), "{w}: its header must be JSON but is damaged: "),
    "header nested without end": (lambda f: raw(f, b"[" * 100_000), "{w}: its header must be JSON but is damaged: "),
    "tensor without offsets": (
        lambda f: raw(f, {"a": {"dtype": "F32"}}),
        "{w}: a must have a dtype, a shape and data_of",
    ),
    "negative shape": (
        lambda f: raw(f, {"a": entry(0, 8, shape=[-2])}, bytes(8)),
        "{w}: a must have a dtype, a shape and",
    ),
    "eight-bit floats": (
        lambda f: raw(f, {"a": entry(0, 2, "F8_E4M3")}, bytes(2)),
        "{w}: a must be of a dtype among BOOL",
    ),
    "doubles": (
        lambda f: raw(f, {"a": entry(0, 16, "F64")}, bytes(16)),
        "{w}: a must be of a dtype among BOOL, U8, I8,",
    ),
    "a tensor of a thousand axes": (
        lambda f: raw(f, {"a": entry(0, 4, shape=[1] * 1000)}, bytes(4)),
        "{w}: a must have at most 16 axes but has 1000.",
    ),
    "a tensor with a name of 5,000 characters": (
        lambda f: raw(f, {"a" * 5000: entry(0, 8)}, bytes(8)),
        "{w}: a tensor must have a name of at most 250 characters but one has 5000: 'aaaaaaaa",
    ),
    "length of another shape": (
        lambda f: raw(f, {"a": entry(0, 12)}, bytes(12)),
        "{w}: a must have 8 bytes, F32 of [2], but has 12.",
    ),
    "tensors that overlap": (
        lambda f: raw(f, {"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
        "{w}: b must begin where a ends but overlaps it.",
    ),
    "a gap": (
        lambda f: raw(f, {"a": entry(0, 8), "b": entry(12, 20)}, bytes(20)),
        "{w}: b must begin where a ends but l",
    ),
    "more behind the last": (
        lambda f: raw(f, {"a": entry(0, 8)}, bytes(9)),
        "{w}: must end with a, 8 bytes of data, but ",
    ),
    "a missing tensor": (
        lambda f: tensors(f, **{Q_PROJ: None}),
        "{f}: the tensors must be those that config.json asks for but there are 1 missing: "
        "layers.1.self_attn.q_proj.weight.",
    ),
    "a missing layer": (
        lambda f: edit(f, num_hidden_layers=3),
        "{f}: the number of layers must be that of the tensors, 2, but config.json says 3. Download it again.",
    ),
    "mlx-lm's cut of a DeepSeek-V3": (
        lambda f: tensors(f, **{"model.layers.0.self_attn.embed_q.weight": mx.ones((4, 8, 8))}),
        "1 that nothing needs: layers.0.self_attn.embed_q.weight",
    ),
    "layers without end": (
        lambda f: edit(f, num_hidden_layers=10**9),
        "{c}: the number of layers must be at most 10000 but got 1000000000.",
    ),
    "layers that would take minutes": (
        lambda f: edit(f, num_hidden_layers=9000),
        "{f}: the number of layers must be that of the tensors, 2, but config.json says 9000. Download it again.",
    ),
    "a width that MLX has not": (
        lambda f: edit(f, hidden_size=1 << 60, head_dim=16),
        "{c}: hidden_size must be at most 2147483647 but has 19 digits.",
    ),
    "a width that no tensor has": (
        lambda f: edit(f, intermediate_size=1 << 30),
        "{f}: intermediate_size must be that of the tensors, whose longest axis has 61, but config.json says 1073741",
    ),
    "heads that no tensor has": (
        lambda f: edit(f, head_dim=1 << 30),
        "{f}: num_heads times head_dim must be that of the tensors, whose longest axis has 61, but config.json says 4",
    ),
    "a length that no float holds": (
        lambda f: edit(f, rope_scaling={"rope_type": "linear", "factor": 10**400}),
        "{c}: rope_scaling: factor must be a number of a model but is too large for one.",
    ),
    "model_type in a list": (
        lambda f: edit(f, model_type=["llama"]),
        "{c}: model_type must be among llama, qwen3, qwen2, mistral, gemma3_text, gemma2, gpt2, mixtral, qwen3_moe, ",
    ),
    "end tokens in words": (
        lambda f: edit(f, "generation_config.json", eos_token_id=[2, "x"]),
        "{f}/generation_config.json: eos_token_id must be the id of a token, or a list of ids, but got [2, 'x'].",
    ),
    "weights of a pipe": (
        lambda f: ((f / WEIGHTS).unlink(), os.mkfifo(f / WEIGHTS)),
        "{w}: must be a regular file but is a folder, a pipe or a device.",
    ),
    "a dtype in a list": (
        lambda f: raw(f, {"a": {**entry(0, 8), "dtype": ["F32"]}}, bytes(8)),
        "{w}: a must be of a dtype among BOOL",
    ),
    "an index of a long name": (
        lambda f: shard(f, lambda places: places.update(x=f"{'a' * 5000}.safetensors")),
        "... must be a file of it but: File name too long.",
    ),
    "weights that are a link to themselves": (
        lambda f: ((f / WEIGHTS).unlink(), (f / WEIGHTS).symlink_to(WEIGHTS)),
        "{f}: must hold model.safetensors or model.safetensors.index.json but has model.safetensors.",
    ),
    "layers left over": (
        lambda f: edit(f, num_hidden_layers=1),
        "there are 9 that nothing needs: layers.1.input_layernorm.weight; layers.1.mlp.down_proj.weight; ",
    ),
    "a tensor left over": (lambda f: tensors(f, extra=mx.ones(3)), "there are 1 that nothing needs: extra."),
    "another shape": (
        lambda f: tensors(f, **{Q_PROJ: mx.ones((32, 31))}),
        "there are 1 that do not fit: layers.1.self_attn.q_proj.weight must make (32, 32) but is (32, 31).",
    ),
    "integers": (
        lambda f: tensors(f, **{Q_PROJ: mx.ones((32, 32), mx.int8)}),
        "there are 1 that do not fit: layers.1.self_attn.q_proj.weight must be floats but is int8.",
    ),
    "a name with and without its prefix": (
        lambda f: tensors(f, **{Q_PROJ.removeprefix("model."): mx.ones((32, 32))}),
        "must be there once but another name of the same is there too.",
    ),
    "a head that is not tied": (
        lambda f: edit(f, tie_word_embeddings=True),
        "{f}: lm_head.weight must be embed_tokens.weight again where tie_word_embeddings is true but is some",
    ),
    "an index that leaves the folder": (
        lambda f: shard(f, lambda places: places.update(x="../other.safetensors")),
        "{f}: a file must be named without a path but got '../other.safetensors'.",
    ),
    "an index with an absolute path": (
        lambda f: shard(f, lambda places: places.update(x="/etc/other.safetensors")),
        "{f}: a file must be named without a path but got '/etc/other.safetensors'.",
    ),
    "an index of a pickle": (
        lambda f: shard(f, lambda places: places.update(x="weights.bin")),
        "weight_map must name safetensors files but got 'weights.bin'.",
    ),
    "an index of a name that is too long": (
        lambda f: shard(f, lambda places: places.update(x="a" * 5000)),
        "model.safetensors.index.json: weight_map must name safetensors files but got 'aaaaaaaa",
    ),
    "an index of half a character": (
        lambda f: shard(f, lambda places: places.update(x="\ud800.safetensors")),
        "model.safetensors.index.json: weight_map must name safetensors files but got '\\ud800.safetensors'.",
    ),
    "an index of a missing file": (
        lambda f: shard(f, lambda places: places.update(x="model-00003-of-00003.safetensors")),
        "{f}/model-00003-of-00003.safetensors: is missing, which model.safetensors.index.json names. Down",
    ),
    "an index of a missing tensor": (
        lambda f: shard(f, lambda places: places.update(x="model-00002-of-00002.safetensors")),
        "model-00002-of-00002.safetensors: must hold what model.safetensors.index.json says but x and 0 more are missi",
    ),
    "an index without a map": (
        lambda f: (shard(f), (f / "model.safetensors.index.json").write_text("{}")),
        "model.safetensors.index.json: weight_map must say for each tensor the file that it is in.",
    ),
    "a tensor in two shards": (repeat_in_both, " must be in one file but is in another one too."),
    "a missing shard without an index": (
        without_index,
        "{f}: must hold 2 shards but model-00001-of-00002.safetensors do",
    ),
    "a link out of the folder": (link, "{w}: must stay in its folder but is a link to "),
}
