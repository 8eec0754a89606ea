"""Folders that are no model, each refused in one clear line; and what looks like a fault and is none."""

import os
from pathlib import Path
import shutil

from broken_folders import CONFIG, WEIGHTS, V, edit, shard, tensors
from folder_faults import FAULTS
from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.hub.errors import HubError
from forge_mlx.hub.json_files import read_object
from forge_mlx.hub.pretrained import is_pretrained, load_pretrained, read_shape, save_pretrained
from forge_mlx.models.gpt import GPT
import mlx.core as mx
import pytest
from tiny_tokenizer import write_tokenizer

TOKENS = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])


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
    buffers = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
    tensors(folder, **{"lm_head.weight": table}, **dict.fromkeys(buffers, mx.ones(4)))
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
