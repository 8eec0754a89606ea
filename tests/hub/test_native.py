import json
import resource
import shutil

from forge_mlx.hub.native import ModelFolderError, begins_with_end, load_model, load_weights, save_model
from forge_mlx.models.gpt import GPT, GPTConfig
import mlx.core as mx
from mlx.utils import tree_flatten
import numpy as np
import pytest
from tiny_bpe import tiny_bpe

CONFIGS = {
    "llama": GPTConfig(vocab_size=300, num_layers=2, hidden_size=16, num_heads=2, num_kv_heads=1, rope_base=5e5),
    "gpt2": GPTConfig(
        vocab_size=300,
        num_layers=1,
        hidden_size=16,
        num_heads=2,
        norm="layer_norm",
        position="learned",
        mlp="gelu",
        bias=True,
        dropout=0.1,
    ),
    "modded": GPTConfig(
        vocab_size=300,
        num_layers=1,
        hidden_size=16,
        num_heads=2,
        norm_weight=False,
        qk_norm=True,
        mlp="relu2",
        tie_embeddings=False,
        logit_softcap=15.0,
    ),
}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_bpe()


@pytest.fixture
def folder(tmp_path, tokenizer):
    path = tmp_path / "model"
    path.mkdir()
    save_model(path, GPT(CONFIGS["llama"], seed=3), tokenizer)
    return path


def error(path):
    with pytest.raises(ModelFolderError) as caught:
        load_model(path)
    return str(caught.value)


@pytest.mark.parametrize("family", CONFIGS)
def test_what_is_saved_loads_again(tmp_path, tokenizer, family):
    model = GPT(CONFIGS[family], seed=3)
    save_model(tmp_path, model, tokenizer)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors", "tokenizer.model"]
    loaded, loaded_tokenizer = load_model(tmp_path)
    assert loaded.config == model.config
    assert not loaded.training
    assert not loaded.layers[0].training
    assert loaded_tokenizer.fingerprint == tokenizer.fingerprint
    saved, found = dict(tree_flatten(model.parameters())), dict(tree_flatten(loaded.parameters()))
    assert saved.keys() == found.keys()
    for name, array in saved.items():
        np.testing.assert_array_equal(np.array(array), np.array(found[name]), err_msg=name)
    tokens = mx.array([[1, 2, 3]])
    model.eval()
    np.testing.assert_array_equal(np.array(model(tokens)), np.array(loaded(tokens)))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.model"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    assert error(folder) == f"{folder}: is no model folder: {name} is missing."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": "two"}, "describes no GPT: num_layers: Input should be a valid integer."),
        ({"layers": 2}, "describes no GPT: layers: Extra inputs are not permitted."),
        ({"num_heads": 3}, "describes no GPT: the file: Value error, hidden_size must be a multiple of num_heads"),
        ({"vocab_size": None}, "vocab_size must be a number but got null."),
    ],
)
def test_a_config_of_no_model(folder, change, message):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert error(folder).startswith(f"{file}: {message}")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]"], ids=["empty", "cut", "not UTF-8", "a list"])
def test_a_damaged_config(folder, content):
    (folder / "config.json").write_bytes(content)
    assert error(folder).startswith(f"{folder / 'config.json'}: describes no GPT: the file: ")


def test_damaged_weights(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for content in (b"", whole[:5], whole[:200], whole[:-1], b"\xff" * len(whole)):
        file.write_bytes(content)
        assert error(folder).startswith(f"{file}: is damaged or of another model: ")


def test_weights_of_another_model(folder):
    file = folder / "model.safetensors"
    for change in ({"num_layers": 3}, {"num_layers": 1}, {"hidden_size": 8}, {"tie_embeddings": False}):
        other = CONFIGS["llama"].model_copy(update=change)
        (folder / "config.json").write_text(other.model_dump_json())
        assert error(folder).startswith(f"{file}: is damaged or of another model: ")


def test_a_damaged_tokenizer(folder):
    (folder / "tokenizer.model").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="must be a SentencePiece model"):
        load_model(folder)


def test_a_full_disk_is_called_that(tmp_path, tokenizer):
    # The limit on a file's size makes the kernel itself refuse the write, as a full disk does.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_model(tmp_path, GPT(CONFIGS["llama"], seed=3), tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_weights_alone_go_into_a_model(folder, tmp_path):
    model = GPT(CONFIGS["llama"], seed=9)
    copy = tmp_path / "weights.safetensors"
    shutil.copy(folder / "model.safetensors", copy)
    load_weights(model, copy)
    expected, _ = load_model(folder)
    for (name, a), (_, b) in zip(tree_flatten(model.parameters()), tree_flatten(expected.parameters()), strict=True):
        np.testing.assert_array_equal(np.array(a), np.array(b), err_msg=name)


def test_a_folder_says_whether_texts_begin_with_the_end_token(folder, tmp_path, tokenizer):
    # As before there was such a key.
    assert not begins_with_end(folder)
    assert "texts_begin_with_end" not in (folder / "config.json").read_text()
    save_model(tmp_path, GPT(CONFIGS["gpt2"]), tokenizer, texts_begin_with_end=True)
    assert begins_with_end(tmp_path)
    assert load_model(tmp_path)[0].config == CONFIGS["gpt2"]
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"texts_begin_with_end": 1}))
    for function in (load_model, begins_with_end):
        with pytest.raises(
            ModelFolderError, match=r"config\.json: texts_begin_with_end must be true or false but got 1"
        ):
            function(folder)
