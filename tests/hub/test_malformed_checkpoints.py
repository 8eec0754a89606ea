"""Folders that are no model, each refused in one clear line; and what looks like a fault and is none."""

import json
import os
from pathlib import Path
import shutil
import struct

from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.hub.errors import HubError
from forge_mlx.hub.json_files import read_object
from forge_mlx.hub.pretrained import is_pretrained, load_pretrained, read_shape, save_pretrained
from forge_mlx.models.gpt import GPT, GPTConfig
import mlx.core as mx
import pytest
from tiny_tokenizer import write_tokenizer

V = 61
CONFIG = GPTConfig(
    vocab_size=V, num_layers=2, hidden_size=32, num_heads=4, intermediate_size=48, max_seq_len=64, tie_embeddings=False
)
TOKENS = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
WEIGHTS = "model.safetensors"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole")
    write_tokenizer(path, V)
    save_pretrained(path / "model", GPT(CONFIG, seed=3).eval(), HubTokenizer.load(path))
    return path / "model"


@pytest.fixture
def folder(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "model"))


def quiet(line: str) -> None:
    raise AssertionError(line)


def edit(folder, name="config.json", **changes):
    """Change keys of a JSON file; a value of ... removes one."""
    values = json.loads((folder / name).read_text()) | changes
    (folder / name).write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


def tensors(folder, **changes):
    """Change tensors; None removes one."""
    arrays = dict(mx.load(str(folder / WEIGHTS))) | changes
    arrays = {name: mx.array(array) for name, array in arrays.items() if array is not None}
    mx.eval(arrays)
    mx.save_safetensors(str(folder / WEIGHTS), arrays)


def shard(folder, change=lambda _: None):
    """Split the weights in two files with an index, which `change` may change."""
    arrays = dict(mx.load(str(folder / WEIGHTS)))
    mx.eval(arrays)
    names = sorted(arrays)
    places = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        name = f"model-0000{number}-of-00002.safetensors"
        mx.save_safetensors(str(folder / name), {each: arrays[each] for each in part})
        places |= dict.fromkeys(part, name)
    (folder / WEIGHTS).unlink()
    change(places)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def raw(folder, header, data=b"", length=None):
    """Write a safetensors file by hand."""
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(content) if length is None else length) + content + data)


def entry(begin, end, dtype="F32", shape=(2,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def only(folder, name):
    (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(b"x")


def link(folder):
    outside = folder.parent / "elsewhere.safetensors"
    (folder / WEIGHTS).rename(outside)
    (folder / WEIGHTS).symlink_to(outside)


def cut(folder, name, keep):
    (folder / name).write_bytes((folder / name).read_bytes()[:keep])


def repeat_in_both(folder):
    shard(folder)
    file = folder / "model-00002-of-00002.safetensors"
    arrays = dict(mx.load(str(file))) | {"model.norm.weight": mx.ones(32), "lm_head.weight": mx.ones((V, 32))}
    mx.eval(arrays)
    mx.save_safetensors(str(file), arrays)


def without_index(folder):
    shard(folder)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00001-of-00002.safetensors").unlink()


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
        "{f}: kv_b_proj must be one matrix but layers.0.self_attn.embed_q.weight is a part of it, as mlx-lm's conv",
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


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_has_one_clear_line(folder, name):
    damage, message = FAULTS[name]
    damage(folder)
    with pytest.raises(ValueError, match=r"[.?]$") as caught:
        load_pretrained(folder, log=quiet)
    text = str(caught.value)
    assert message.format(f=folder, c=folder / "config.json", w=folder / WEIGHTS) in text
    assert "\n" not in text
    assert len(text) < 600


def test_the_whole_folder_opens(folder):
    opened = load_pretrained(folder, log=quiet)
    assert opened.family == "llama"
    assert opened.model.config.head_size == 8
    assert mx.array_equal(opened.model(TOKENS), GPT(CONFIG, seed=3).eval()(TOKENS))
    assert is_pretrained(folder)
    assert not is_pretrained(folder.parent)


def test_shards_open_with_and_without_their_index(folder):
    expected = GPT(CONFIG, seed=3).eval()(TOKENS)
    shard(folder)
    assert mx.array_equal(load_pretrained(folder, log=quiet).model(TOKENS), expected)
    (folder / "model.safetensors.index.json").unlink()
    assert mx.array_equal(load_pretrained(folder, log=quiet).model(TOKENS), expected)


def test_keys_that_nobody_knows_are_named_once(folder):
    edit(folder, sparkle=3, glitter=None, use_cache=False, temperature=0.6)
    lines = []
    load_pretrained(folder, log=lines.append)
    assert lines == [f"{folder / 'config.json'}: 2 keys are not known and not used: glitter, sparkle"]


def test_a_quantization_without_codes_is_said(folder):
    edit(folder, quantization={"bits": 4, "group_size": 32})
    lines = []
    opened = load_pretrained(folder, log=lines.append)
    assert lines == [f"{folder}: config.json has a quantization but no layer has codes: the weights are read as floats"]
    assert mx.array_equal(opened.model(TOKENS), GPT(CONFIG, seed=3).eval()(TOKENS))


def test_a_pipe_is_no_json(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(HubError, match=r"pipe\.json: must be a regular file but is a folder, a pipe or a device\."):
        read_object(tmp_path / "pipe.json")


def test_buffers_and_a_copied_head_are_no_weights(folder):
    edit(folder, tie_word_embeddings=True)
    table = dict(mx.load(str(folder / WEIGHTS)))["model.embed_tokens.weight"]
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": mx.ones(4)}
    tensors(folder, **{"lm_head.weight": table}, **buffer)
    assert load_pretrained(folder, log=quiet).model.config.tie_embeddings


def test_names_without_their_prefix(folder):
    arrays = {name.removeprefix("model."): array for name, array in mx.load(str(folder / WEIGHTS)).items()}
    mx.eval(arrays)
    mx.save_safetensors(str(folder / WEIGHTS), arrays)
    assert mx.array_equal(load_pretrained(folder, log=quiet).model(TOKENS), GPT(CONFIG, seed=3).eval()(TOKENS))


def test_links_within_the_hugging_face_cache_are_followed(folder, tmp_path):
    cache = tmp_path / "models--owner--name"
    (cache / "snapshots").mkdir(parents=True)
    (cache / "blobs").mkdir()
    snapshot = cache / "snapshots" / "0123abc"
    snapshot.mkdir()
    for file in folder.iterdir():
        file.rename(cache / "blobs" / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert load_pretrained(snapshot, log=quiet).family == "llama"


def test_links_within_the_folder_are_followed(folder):
    (folder / WEIGHTS).rename(folder / "real.safetensors")
    (folder / WEIGHTS).symlink_to("real.safetensors")
    assert load_pretrained(folder, log=quiet).family == "llama"


def test_a_dtype_that_is_none(folder):
    with pytest.raises(ValueError, match=r"^\[load_pretrained\] dtype must be float32, float16 or bfloat16 but got "):
        load_pretrained(folder, dtype=mx.int8)


def test_a_file_that_is_no_model(folder):
    with pytest.raises(HubError, match=r"must be a folder with config\.json, or a \.gguf file, but is neither\."):
        read_shape(folder / "config.json")
