"""A small model folder and the ways to damage it: its JSON, its tensors, its files."""

import json
import struct

from forge_mlx.models.gpt import GPTConfig
import mlx.core as mx

V = 61
CONFIG = GPTConfig(
    vocab_size=V, num_layers=2, hidden_size=32, num_heads=4, intermediate_size=48, max_seq_len=64, tie_embeddings=False
)
WEIGHTS = "model.safetensors"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


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
