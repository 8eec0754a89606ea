from collections import Counter
from functools import partial
import json

from forge_mlx.export import main
from forge_mlx.hub.adapter_files import save_adapters
from forge_mlx.hub.native import save_model
from forge_mlx.models.adapter_config import AdapterConfig
from forge_mlx.models.adapters import add_adapters
from forge_mlx.models.gpt import GPTConfig
from forge_mlx.models.qat import QATConfig, convert_qat, prepare_qat
from forge_mlx.models.registry import build_model
from forge_mlx.opened_model import open_model
import gguf
import mlx.core as mx
import numpy as np
import pytest
from tiny_bpe import tiny_bpe

SHAPE = {"vocab_size": 300, "num_layers": 1, "hidden_size": 64, "num_heads": 2, "max_seq_len": 32}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_bpe()


@pytest.fixture
def command(call_main):
    return partial(call_main, main)


def run_with(path, model, tokenizer, **options):
    """A run's folder with a final model."""
    (path / "final").mkdir(parents=True)
    save_model(path / "final", model, tokenizer, **options)
    return path


@pytest.fixture
def run(tmp_path, tokenizer):
    return run_with(tmp_path / "run", build_model(GPTConfig(**SHAPE)), tokenizer)


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def test_the_final_model_of_a_run(run, tmp_path, command):
    out = tmp_path / "out"
    assert command(run, out) == (
        0,
        f"wrote {out} from {run / 'final'} (llama, float32); open it: mlx_lm.generate --model {out} --prompt ...\n",
        "",
    )
    assert config_of(out)["model_type"] == "llama"
    assert (out / "model.safetensors").stat().st_size > 100_000


def test_a_model_folder_gives_the_same(run, tmp_path, command):
    command(run, tmp_path / "a")
    assert command(run / "final", tmp_path / "b")[0] == 0
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


def test_a_quantised_model_says_its_format(tmp_path, tokenizer, command):
    config = QATConfig(overrides={"embed_tokens": {"bits": 8}})
    model = convert_qat(prepare_qat(build_model(GPTConfig(**SHAPE)), config))
    run = run_with(tmp_path / "run", model, tokenizer)
    out = tmp_path / "of mine"
    assert command(run, out)[1] == (
        f"wrote {out} from {run / 'final'} (llama, affine 4 bits in groups of 64, other formats: 1); "
        f"open it: mlx_lm.generate --model '{out}' --prompt ...\n"
    )


def test_texts_that_begin_with_the_end_token(tmp_path, tokenizer, command):
    run = run_with(tmp_path / "run", build_model(GPTConfig(**SHAPE)), tokenizer, texts_begin_with_end=True)
    command(run, tmp_path / "out")
    assert config_of(tmp_path / "out")["bos_token_id"] == tokenizer.end_id


def test_a_folder_that_is_not_empty_stays(run, tmp_path, command):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes").write_text("mine")
    assert command(run, out) == (
        2,
        "",
        f"error: [export] folder must be new or empty but got {out}. Give another or remove it.\n",
    )
    assert [file.name for file in out.iterdir()] == ["notes"]
    assert command(run, run)[0] == 2


def test_a_folder_without_a_model(tmp_path, command):
    missing = tmp_path / "none"
    assert command(missing, tmp_path / "out") == (
        2,
        "",
        f"error: {missing}: there is no such file or folder, and it is no OWNER/NAME of a model on the hub.\n",
    )
    message = "is neither a model folder nor a run folder with a checkpoint."
    assert command(tmp_path, tmp_path / "out") == (2, "", f"error: {tmp_path}: {message}\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.model"])
def test_a_damaged_file_is_named(run, tmp_path, command, name):
    file = run / "final" / name
    file.write_bytes(file.read_bytes()[:50])
    status, out, err = command(run, tmp_path / "out")
    assert (status, out) == (2, "")
    assert str(file) in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_model_that_the_layout_cannot_say(tmp_path, tokenizer, command):
    run = run_with(tmp_path / "run", build_model(GPTConfig(**SHAPE, mlp="relu2", token_shift=True)), tokenizer)
    status, _, err = command(run, tmp_path / "out")
    assert status == 2
    assert "differs in token_shift: True (must be False); mlp: relu2 (must be swiglu)." in err


def test_an_out_that_cannot_be_made(run, tmp_path, command):
    (tmp_path / "file").touch()
    status, _, err = command(run, tmp_path / "file" / "out")
    assert (status, err) == (
        2,
        f"error: [save_pretrained] folder must be one that can be made but got {tmp_path / 'file' / 'out'}: Not a "
        "directory. Give another.\n",
    )


@pytest.fixture
def published(run, tmp_path, command):
    """A folder in Hugging Face's layout with a key that nobody knows, and a template for chats."""
    folder = tmp_path / "published"
    command(run, folder)
    config = config_of(folder) | {"sparkle": 3, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def arrays(folder):
    return mx.load(str(folder / "model.safetensors"))


def test_a_published_folder(published, tmp_path, command):
    status, out, err = command(published, tmp_path / "out")
    assert (status, out.split(";")[0]) == (0, f"wrote {tmp_path / 'out'} from {published} (llama, float32)")
    assert err == f"{published / 'config.json'}: 1 keys are not known and not used: sparkle\n"
    assert config_of(tmp_path / "out") == config_of(published)
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    theirs, ours = arrays(published), arrays(tmp_path / "out")
    assert theirs.keys() == ours.keys()
    assert all(mx.array_equal(theirs[name], ours[name]) for name in theirs)


def test_a_dtype(published, tmp_path, command):
    assert "(llama, bfloat16)" in command(published, tmp_path / "out", "--dtype", "bfloat16")[1]
    assert {array.dtype for array in arrays(tmp_path / "out").values()} == {mx.bfloat16}


def test_quantised_on_the_way(published, tmp_path, command):
    status, out, _ = command(published, tmp_path / "out", "--quantize", 8, "--group-size", 32)
    assert status == 0
    assert "(llama, affine 8 bits in groups of 32);" in out
    weight = arrays(published)["model.layers.0.mlp.up_proj.weight"]
    codes = [arrays(tmp_path / "out")[f"model.layers.0.mlp.up_proj.{part}"] for part in ("weight", "scales", "biases")]
    made = mx.dequantize(*codes, group_size=32, bits=8)
    assert mx.abs(made - weight).max().item() <= (weight.max() - weight.min()).item() / 255
    status, _, err = command(tmp_path / "out", tmp_path / "again", "--quantize", 4)
    assert (status, err.splitlines()[-1]) == (
        2,
        "error: --quantize needs a float model but embed_tokens and 7 more are codes already. Leave it out, or add "
        "--dequantize.",
    )


def test_rows_that_are_no_whole_groups_stay_floats(tmp_path, tokenizer, command):
    shape = {**SHAPE, "intermediate_size": 96}
    run = run_with(tmp_path / "run", build_model(GPTConfig(**shape)), tokenizer)
    status, _, err = command(run, tmp_path / "out", "--quantize", 4)
    assert (status, err) == (
        0,
        "1 matrices stay floats: their rows are no multiple of 64, as layers.0.mlp.down_proj\n",
    )
    assert "model.layers.0.mlp.down_proj.scales" not in arrays(tmp_path / "out")


def test_floats_keep_the_dtype_of_the_files_whatever_the_config_says(published, tmp_path, command):
    """Half precision that a CPU would widen, and float32 that a wrong `dtype` would round."""
    command(published, tmp_path / "half", "--dtype", "bfloat16")
    assert "(llama, bfloat16)" in command(tmp_path / "half", tmp_path / "a")[1]
    assert {array.dtype for array in arrays(tmp_path / "a").values()} == {mx.bfloat16}
    assert open_model(tmp_path / "half").model.norm.weight.dtype == mx.float32
    (published / "config.json").write_text(json.dumps(config_of(published) | {"dtype": "bfloat16"}))
    assert "(llama, float32)" in command(published, tmp_path / "b")[1]
    theirs, ours = arrays(published), arrays(tmp_path / "b")
    assert all(mx.array_equal(theirs[name], ours[name]) for name in theirs)


UP = "model.layers.0.mlp.up_proj"


def test_floats_of_codes_are_rounded_to_what_is_written_alone(published, tmp_path, command):
    """Not to the dtype of the scales first."""
    coded = tmp_path / "coded"
    command(published, coded, "--quantize", 4, "--dtype", "bfloat16")
    command(coded, tmp_path / "floats", "--dequantize", "--dtype", "float32")
    found = arrays(coded)
    codes, *scales = (found[f"{UP}.{part}"] for part in ("weight", "scales", "biases"))
    assert {each.dtype for each in scales} == {mx.bfloat16}
    want = mx.dequantize(codes, *(each.astype(mx.float32) for each in scales), group_size=64, bits=4)
    assert mx.array_equal(arrays(tmp_path / "floats")[f"{UP}.weight"], want)
    assert command(coded, tmp_path / "f32.gguf", "--dequantize", "--gguf", "f32")[0] == 0
    tensors = {each.name: each.data for each in gguf.GGUFReader(tmp_path / "f32.gguf").tensors}
    assert np.array_equal(tensors["blk.0.ffn_up.weight"], np.array(want))


def adapters_of(folder, path):
    """Adapters of `up_proj` for a model folder, and what they add to its weight, in float64."""
    config = AdapterConfig(rank=4, alpha=6, targets=["up_proj"])
    model = add_adapters(open_model(folder).model, config, seed=0)
    layer = model.layers[0].mlp.up_proj
    layer.lora_b = mx.random.normal(layer.lora_b.shape, key=mx.random.key(3))
    save_adapters(path, model, config, str(folder))
    a, b = (np.array(each, np.float64) for each in (layer.lora_a, layer.lora_b))
    return config.scale * (a @ b).T


def test_adapters_are_merged(published, tmp_path, command):
    moved = adapters_of(published, tmp_path / "adapters")
    status, _, _ = command(published, tmp_path / "out", "--adapter", tmp_path / "adapters")
    assert status == 0
    before, after = arrays(published), arrays(tmp_path / "out")
    want = np.array(before[f"{UP}.weight"], np.float64) + moved
    assert np.abs(np.array(after[f"{UP}.weight"]) - want).max() <= 1e-6 * np.abs(want).max()
    assert all(mx.array_equal(before[name], after[name]) for name in before if name != f"{UP}.weight")


def weight_of_codes(folder, name, group_size=64):
    found = arrays(folder)
    scales, biases = (found[f"{name}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
    return np.array(mx.dequantize(found[f"{name}.weight"], scales, biases, group_size=group_size, bits=4), np.float64)


def test_of_a_quantised_model_adapters_make_codes_anew_or_floats(published, tmp_path, command):
    coded = tmp_path / "coded"
    command(published, coded, "--quantize", 4)
    moved = adapters_of(coded, tmp_path / "adapters")
    options = ("--adapter", tmp_path / "adapters")
    status, _, err = command(coded, tmp_path / "codes", *options)
    said = (
        "1 layer of codes with adapters: codes are made anew of the sum, which rounds away part of what was learned; "
        "--dequantize writes floats instead"
    )
    assert (status, said in err.splitlines()) == (0, True)
    want = weight_of_codes(coded, UP) + moved
    # Half a step of 15 in each group.
    groups = want.reshape(len(want), -1, 64)
    step = (groups.max(-1) - groups.min(-1)).max() / 15
    assert 1e-3 < np.abs(weight_of_codes(tmp_path / "codes", UP) - want).max() <= step
    status, out, err = command(coded, tmp_path / "floats", *options, "--dequantize")
    assert (status, said in err, "(llama, float32)" in out) == (0, False, True)
    floats = arrays(tmp_path / "floats")
    assert np.abs(np.array(floats[f"{UP}.weight"]) - want).max() <= 1e-6 * np.abs(want).max()
    down = "model.layers.0.mlp.down_proj"
    assert np.array_equal(np.array(floats[f"{down}.weight"]), weight_of_codes(coded, down))
    assert command(coded, tmp_path / "eight", "--dequantize", "--quantize", 8)[0] == 0
    assert config_of(tmp_path / "eight")["quantization"]["bits"] == 8
    # Before anything is said of merging.
    status, _, err = command(coded, tmp_path / "refused", *options, "--quantize", 4)
    assert (status, "made anew" in err, "--quantize needs a float model" in err) == (2, False, True)
    status, out, _ = command(coded, tmp_path / "plain", "--dequantize")
    assert (status, "(llama, float32)" in out) == (0, True)
    assert np.array_equal(np.array(arrays(tmp_path / "plain")[f"{UP}.weight"]), weight_of_codes(coded, UP))


@pytest.mark.parametrize(
    ("kind", "group_size", "types"),
    [
        ("f32", 64, ("F32", "F32")),
        ("f16", 64, ("F16", "F16")),
        ("q8_0", 32, ("Q8_0", "Q4_1")),
        ("q4_0", 64, ("Q4_0", "Q4_0")),
        ("q4_0", 32, ("Q4_1", "Q4_1")),
    ],
    ids=["f32", "f16", "q8_0", "q4_0", "q4_0 that keeps codes"],
)
def test_in_a_gguf_file_adapters_over_codes_are_rounded_once(published, tmp_path, command, kind, group_size, types):
    """The weight is as near to the sum of codes and adapters as the package gguf or MLX rounds it to."""
    coded, file = tmp_path / "coded", tmp_path / "model.gguf"
    command(published, coded, "--quantize", 4, "--group-size", group_size)
    moved = adapters_of(coded, tmp_path / "adapters")
    status, out, err = command(coded, file, "--gguf", kind, "--adapter", tmp_path / "adapters")
    said = "merged as floats, as by --dequantize"
    if types[0] == "Q4_1":
        said = "codes are made anew of the sum, which rounds away part of what was learned; q8_0 keeps more"
    assert (status, err.splitlines()[-1]) == (0, f"1 layer of codes with adapters: {said}")
    reader = gguf.GGUFReader(file)
    found = {each.name: each for each in reader.tensors}
    counts = Counter(each.tensor_type.name for each in reader.tensors)
    assert sorted(out.split("tensors: ")[1].split(")")[0].split(", ")) == sorted(f"{counts[n]} {n}" for n in counts)
    # What most matrices are, whatever was asked for.
    most = "ALL_F32" if kind == "f32" else f"MOSTLY_{types[1]}"
    assert gguf.LlamaFileType(reader.fields["general.file_type"].contents()).name == most
    up, down = found["blk.0.ffn_up.weight"], found["blk.0.ffn_down.weight"]
    assert (up.tensor_type.name, down.tensor_type.name) == types
    want = weight_of_codes(coded, UP, group_size) + moved
    if types[0] == "Q4_1":
        rounded = mx.dequantize(*mx.quantize(mx.array(want.astype(np.float32)), group_size, 4), group_size, 4)
    else:
        rounded = gguf.dequantize(gguf.quantize(want.astype(np.float32), up.tensor_type), up.tensor_type)
    least = np.abs(np.array(rounded) - want).max()
    error = np.abs(gguf.dequantize(up.data, up.tensor_type) - want).max()
    assert error <= 1.01 * least + 1e-6 * np.abs(want).max()


@pytest.mark.parametrize("options", [(), ("--dequantize",)], ids=["codes", "dequantized"])
@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_codes_of_16_bits_are_rounded_by_the_file_alone(published, tmp_path, command, kind, options):
    """Not to bfloat16, the dtype of their scales, first; with adapters (up) or without (down)."""
    coded, file = tmp_path / "coded", tmp_path / "model.gguf"
    command(published, coded, "--quantize", 4, "--dtype", "bfloat16")
    moved = adapters_of(coded, tmp_path / "adapters")
    assert command(coded, file, "--gguf", kind, "--adapter", tmp_path / "adapters", *options)[0] == 0
    found = {each.name: each.data for each in gguf.GGUFReader(file).tensors}
    step = np.finfo(np.float32 if kind == "f32" else np.float16).eps
    for name, want in (
        ("blk.0.ffn_up.weight", weight_of_codes(coded, UP) + moved),
        ("blk.0.ffn_down.weight", weight_of_codes(coded, "model.layers.0.mlp.down_proj")),
    ):
        assert np.abs(found[name].astype(np.float64) - want).max() <= step * np.abs(want).max()


def test_a_gguf_file_that_exists_is_refused_before_the_model_is_read(tmp_path, command):
    out = tmp_path / "model.gguf"
    out.write_bytes(b"mine")
    message = f"error: [export] file must be new but {out} exists. Give another or remove it.\n"
    assert command(tmp_path / "no-model", out, "--gguf", "f16") == (2, "", message)
    assert out.read_bytes() == b"mine"


@pytest.mark.parametrize("of", ["run", "published"])
def test_a_gguf_file(request, tmp_path, command, of):
    model = request.getfixturevalue(of)
    status, out, _ = command(model, tmp_path / "model.gguf", "--gguf", "f32")
    assert (status, out.split(";")[1]) == (0, f" open it: llama-cli -m {tmp_path / 'model.gguf'}\n")
    assert command(tmp_path / "model.gguf", tmp_path / "back")[0] == 0
    source = run_arrays(model)
    back = arrays(tmp_path / "back")
    assert all(mx.array_equal(back[f"model.{name}"], array) for name, array in source.items())


def run_arrays(path):
    folder = path / "final" if (path / "final").is_dir() else path
    return {name.removeprefix("model."): array for name, array in arrays(folder).items()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gguf", "f16", "--dtype", "float16"), "--gguf says the type of all numbers: leave out --quantize and"),
        (("--group-size", 32), "--group-size needs --quantize."),
        (("--dequantize",), "--dequantize needs a quantised model but "),
        (("--quantize", 7), "[export] bits must be 4, 2, 3, 5, 6 or 8 in the mode 'affine' but got 7"),
    ],
)
def test_options_that_do_not_go_together(run, tmp_path, command, options, message):
    status, out, err = command(run, tmp_path / "out", *options)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_is_not_named_as_a_gguf_file(run, tmp_path, command):
    out = tmp_path / "out.gguf"
    message = f"error: --gguf must say the type of the numbers of a GGUF file, as {out} is: add --gguf f16.\n"
    assert command(run, out) == (2, "", message)
    assert not out.exists()


def test_help_says_what_it_does(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("usage: python -m forge_mlx.export", "which mlx-lm opens", "which must be new or empty", "RUN/final"):
        assert part in text
