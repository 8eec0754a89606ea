"""Folders that look like the published ones open, train, and open elsewhere: see published_layouts.py."""

import dataclasses
import importlib
import json
import math
from pathlib import Path

from forge_mlx import export, generate
from forge_mlx.data.chat import render_prompt
from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.hub.errors import HubError
from forge_mlx.hub.pretrained import load_pretrained, save_pretrained
from forge_mlx.metal.dtypes import dtype_name
from forge_mlx.nn.coded import Coded
from forge_mlx.nn.parameters import named_arrays
from forge_mlx.opened_model import open_model
from forge_mlx.train.load import load_config
from forge_mlx.train.loop import train
import mlx.core as mx
import numpy as np
from published_configs import V
from published_layouts import LAYOUTS, write_published
import pytest
from safetensors.torch import load_file
from tiny_models import hugging_face
import torch

TOKENS = np.random.default_rng(5).integers(0, V, (2, 24))
_NO_PARAMETERS = (".attn.bias", ".masked_bias", ".inv_freq")
EXPORTS = {
    "x": ["--dtype", "float32"],
    "x-4bit": ["--quantize", "4", "--group-size", "32"],
    "x.gguf": ["--gguf", "f32"],
}
_OF_IMAGES = ("vision_tower.", "multi_modal_projector.")


def quiet(line: str) -> None:
    raise AssertionError(line)


def numbers_of(folder: Path, name: str) -> dict:
    return json.loads((folder / name).read_text())


def ends_in(values: dict) -> set[int]:
    ends = values["eos_token_id"]
    return set(ends) if isinstance(ends, list) else {ends}


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_opens(tmp_path, name):
    layout = LAYOUTS[name]
    folder = write_published(layout, tmp_path / "one")
    lines = []
    opened = load_pretrained(folder, log=lines.append)
    assert [line.partition(": ")[2] for line in lines] == list(layout.said)
    arrays = dict(named_arrays(opened.model.parameters()))
    shapes = layout.shapes(layout.text)
    read = [each for each in shapes if not each.endswith(_NO_PARAMETERS) and not each.startswith(_OF_IMAGES)]
    assert sum(array.size for array in arrays.values()) == sum(math.prod(shapes[each]) for each in read)
    kept = {dtype_name(array.dtype) for key, array in arrays.items() if not key.endswith(".selection_bias")}
    assert kept == {str(layout.dtype).removeprefix("torch.")}
    ends = ends_in(numbers_of(folder, "generation_config.json"))
    assert opened.tokenizer.stop_ids == ends
    has_template = any("chat_template" in file or b"chat_template" in text for file, text in layout.files.items())
    assert (opened.tokenizer.chat_template is not None) == (has_template or "chat_template.jinja" in layout.extra)


@pytest.mark.parametrize("name", ["Llama-3.2-1B-Instruct", "gemma-2-2b-it", "gemma-3-4b-it", "gpt2"])
def test_without_generation_config_end_tokens_are_those_of_config(tmp_path, name):
    """As mlx-lm's older conversions are."""
    layout = LAYOUTS[name]
    # Of gpt2 nothing else names one; without the template nothing tells a turn's.
    files = {file: text for file, text in layout.files.items() if file != "special_tokens_map.json"}
    settings = json.loads(files["tokenizer_config.json"])
    settings.pop("chat_template", None)
    files["tokenizer_config.json"] = json.dumps(settings).encode()
    layout = dataclasses.replace(layout, files=files, extra={})
    folder = write_published(layout, tmp_path / "one")
    ends = ends_in(numbers_of(folder, "generation_config.json"))
    (folder / "generation_config.json").unlink()
    assert HubTokenizer.load(folder).stop_ids == ends
    opened = load_pretrained(folder, log=lambda _: None)
    assert opened.tokenizer.stop_ids == ends
    save_pretrained(tmp_path / "ours", opened.model, opened.tokenizer, source=opened.config, log=lambda _: None)
    assert ends_in(numbers_of(tmp_path / "ours", "generation_config.json")) == ends
    assert load_pretrained(tmp_path / "ours", log=quiet).tokenizer.stop_ids == ends


@pytest.mark.parametrize("content", [{"eos_token_id": "2"}, {"eos_token_id": [1, None]}, {"eos_token_id": None}, {}])
def test_end_tokens_of_config_that_are_none(tmp_path, content):
    (tmp_path / "config.json").write_text(json.dumps(content))
    for file, text in LAYOUTS["gpt2"].files.items():
        (tmp_path / file).write_bytes(text)
    with pytest.raises(ValueError, match=r"must name its end token but got no eos_token\. Set eos_token in"):
        HubTokenizer.load(tmp_path)


def test_the_token_that_ends_a_turn_is_written_as_an_end_token(tmp_path):
    """As with a base model that is taught to chat: other readers know no other end tokens."""
    layout = dataclasses.replace(LAYOUTS["gemma-2-2b-it"], generation={"eos_token_id": "<eos>", "top_k": 64})
    opened = load_pretrained(write_published(layout, tmp_path / "one"), log=quiet)
    end, end_of_turn = (opened.tokenizer.token_id(token) for token in ("<eos>", "<end_of_turn>"))
    lines = []
    for folder, generation in (("given", opened.generation), ("not given", None)):
        save_pretrained(
            tmp_path / folder,
            opened.model,
            opened.tokenizer,
            source=opened.config,
            generation=generation,
            log=lines.append,
        )
        written = numbers_of(tmp_path / folder, "generation_config.json")
        assert written == {"eos_token_id": [end, end_of_turn], "top_k": 64}
    said = "generation_config.json: other readers are told to stop at <end_of_turn> too, as the model does here"
    assert [line for line in lines if not line.startswith("mlx-lm")] == [said, said]


def test_code_of_a_folder_is_not_named_where_it_is_not(tmp_path):
    layout = LAYOUTS["SmolLM2-135M-Instruct"]
    code = {"AutoModelForCausalLM": "modeling.Model"}
    folder = write_published(dataclasses.replace(layout, config={**layout.config, "auto_map": code}), tmp_path / "one")
    opened = load_pretrained(folder, log=quiet)
    save_pretrained(tmp_path / "ours", opened.model, opened.tokenizer, source=opened.config, log=quiet)
    written = numbers_of(tmp_path / "ours", "config.json")
    assert "auto_map" not in written
    assert written["is_llama_config"]


@pytest.mark.parametrize(
    ("name", "settings", "is_changed"),
    [
        ("TinyLlama-1.1B-Chat-v1.0", {}, True),
        ("TinyLlama-1.1B-Chat-v1.0", {"tokenizer_class": "LlamaTokenizerFast", "legacy": None}, True),
        ("TinyLlama-1.1B-Chat-v1.0", {"legacy": True}, False),
        ("Llama-3.2-1B-Instruct", {"tokenizer_class": "LlamaTokenizerFast"}, False),
        ("gemma-3-1b-it", {}, False),
    ],
    ids=["TinyLlama", "legacy left open", "legacy", "byte-level", "Gemma"],
)
def test_a_tokenizer_that_transformers_would_build_anew_is_written_with_another_class(
    tmp_path, name, settings, is_changed
):
    layout = LAYOUTS[name]
    settings = {**json.loads(layout.files["tokenizer_config.json"]), **settings}
    files = {**layout.files, "tokenizer_config.json": json.dumps(settings).encode()}
    opened = load_pretrained(write_published(dataclasses.replace(layout, files=files), tmp_path / "one"), log=quiet)
    lines = []
    save_pretrained(tmp_path / "ours", opened.model, opened.tokenizer, source=opened.config, log=lines.append)
    written = numbers_of(tmp_path / "ours", "tokenizer_config.json")
    assert written == {**settings, **({"tokenizer_class": "PreTrainedTokenizerFast"} if is_changed else {})}
    assert [line.partition(" instead of ")[0] for line in lines] == (
        ["tokenizer_config.json: tokenizer_class is PreTrainedTokenizerFast"] if is_changed else []
    )


def test_codes_of_a_model_of_text_and_images(tmp_path):
    """As mlx-vlm converts it: codes of the language model, the tower as it was, and both keys in config.json."""
    folder = write_published(dataclasses.replace(LAYOUTS["gemma-3-4b-it"], shards=1), tmp_path / "one")
    tensors = mx.load(str(folder / "model.safetensors"))
    options = {"group_size": 32, "bits": 4, "mode": "affine"}
    config = numbers_of(folder, "config.json")
    coded, floats = {}, {}
    for name, array in tensors.items():
        module, _, part = name.rpartition(".")
        if name.startswith("language_model.") and array.ndim == 2 and array.shape[-1] % 32 == 0:
            weight, scales, biases = mx.quantize(array, 32, 4)
            coded |= {f"{module}.weight": weight, f"{module}.scales": scales, f"{module}.biases": biases}
            exact = (each.astype(mx.float32) for each in (scales, biases))
            floats[f"{module}.{part}"] = mx.dequantize(weight, *exact, 32, 4)
        else:
            coded[name] = floats[name] = array
    opened = []
    for written, quantization in ((floats, {}), (coded, {"quantization": options, "quantization_config": options})):
        mx.save_safetensors(str(folder / "model.safetensors"), written, {"format": "mlx"})
        (folder / "config.json").write_text(json.dumps({**config, **quantization}))
        opened.append(load_pretrained(folder, dtype=mx.float32, log=lambda _: None).model)
    assert sum(isinstance(module, Coded) for module in opened[1].modules()) == 6 * 6 + 1
    expected, found = (np.array(model(mx.array(TOKENS))) for model in opened)
    assert_close(found, expected, 1e-5)


def test_a_snapshot_without_safetensors_says_that_pickles_are_not_downloaded(tmp_path):
    home = tmp_path / "models--one--two"
    folder = write_published(dataclasses.replace(LAYOUTS["gpt2"], extra={}), home / "snapshots" / "0123")
    (folder / "model.safetensors").unlink()
    with pytest.raises(HubError, match="but has no weights, and pickles, which can run code, are not downloaded"):
        load_pretrained(folder, log=quiet)


def their_model(folder: Path, layout):
    """transformers' model of a published folder; of one with images its text model."""
    options = {"attn_implementation": "eager", "dtype": torch.float32}
    if "text_config" not in layout.config:
        return with_plain_experts(hugging_face().AutoModelForCausalLM.from_pretrained(folder, **options))
    model = hugging_face().Gemma3ForCausalLM(hugging_face().Gemma3TextConfig(**layout.text))
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= {name.removeprefix("language_model."): array.float() for name, array in load_file(file).items()}
    kept = {name: array for name, array in tensors.items() if not name.startswith(_OF_IMAGES)}
    missing, unexpected = model.load_state_dict(kept, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    return model


def with_plain_experts(model):
    model.config._experts_implementation = "eager"
    return model


def logits_of(model):
    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS)).logits.numpy()


def assert_close(found, expected, tolerance):
    np.testing.assert_allclose(np.array(found), expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_are_transformers_of_the_same_folder_and_of_what_we_save(tmp_path, name):
    layout = LAYOUTS[name]
    folder = write_published(layout, tmp_path / "one")
    opened = load_pretrained(folder, dtype=mx.float32, log=lambda _: None)
    expected = logits_of(their_model(folder, layout))
    assert np.abs(expected).max() > 0.5
    assert_close(opened.model(mx.array(TOKENS)), expected, 1e-5)
    ours = tmp_path / "ours"
    save_pretrained(
        ours,
        opened.model,
        opened.tokenizer,
        source=opened.config,
        generation=opened.generation,
        dtype=opened.stored_dtype,
        log=lambda _: None,
    )
    options = {"attn_implementation": "eager", "dtype": torch.float32}
    again, info = hugging_face().AutoModelForCausalLM.from_pretrained(ours, output_loading_info=True, **options)
    assert not any(info.values()), info
    assert_close(logits_of(with_plain_experts(again)), expected, 1e-5)
    model, tokenizer = importlib.import_module("mlx_lm").load(str(ours))
    model.set_dtype(mx.float32)
    assert_close(model(mx.array(TOKENS)), expected, 1e-5)
    assert set(tokenizer.eos_token_ids) == opened.tokenizer.stop_ids
    said = "Hello\n\nyes  a"
    assert tokenizer.encode(said) == opened.tokenizer.begin_ids + opened.tokenizer.encode(said)
    if opened.tokenizer.chat_template is not None:
        turns = [{"role": role, "content": said} for role in ("user", "assistant", "user")]
        assert tokenizer.apply_chat_template(turns, add_generation_prompt=True) == render_prompt(
            opened.tokenizer, turns
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_it_is_tuned_talks_and_is_exported(tmp_path, name, call_main):
    mx.disable_compile()
    try:
        folder = write_published(LAYOUTS[name], tmp_path / "one")
        is_chat = HubTokenizer.load(folder).chat_template is not None
        losses, run = tuned(tmp_path, folder, "chat" if is_chat else "text")
    finally:
        mx.enable_compile()
    assert losses[-1] < losses[0]
    status, _, err = call_main(
        generate.main, run, *(["--chat"] if is_chat else []), "--prompt", "Hello", "--max-tokens", 3
    )
    assert status == 0, err
    expected = np.array(open_model(run).model(mx.array(TOKENS)))
    for out, options in EXPORTS.items():
        status, _, err = call_main(export.main, run, tmp_path / out, *options)
        if out == "x.gguf" and name == "Mistral-7B-v0.1":
            assert status == 2
            assert "sliding_window: 4096 (must be None)" in err
            continue
        assert status == 0, err
        found = np.array(load_pretrained(tmp_path / out, dtype=mx.float32, log=lambda _: None).model(mx.array(TOKENS)))
        assert np.isfinite(found).all()
        if out != "x-4bit":
            assert_close(found, expected, 1e-4)


def tuned(tmp_path: Path, folder: Path, kind: str) -> tuple[list[float], Path]:
    """The losses of a run of three steps of LoRA, and its folder."""
    words = ("user", "yes", "model", "a", "b", "c", "d", "e")
    examples = [
        {
            "messages": [{"role": "user", "content": f"Hello {word}"}, {"role": "assistant", "content": "yes"}],
            "text": f"Hello {word} yes",
        }
        for word in words
    ]
    wanted = "messages" if kind == "chat" else "text"
    (tmp_path / "e.jsonl").write_text("".join(json.dumps({wanted: each[wanted]}) + "\n" for each in examples))
    values = {
        "run": {"dir": str(tmp_path / "run"), "device": "cpu"},
        "model": {"path": str(folder)},
        "data": {"source": str(tmp_path / "e.jsonl"), "format": kind, "valid_fraction": 0.2},
        "adapter": {"method": "lora", "rank": 4},
        "train": {"steps": 3, "batch_size": 2, "seq_len": 64, "log_every": 1, "sample_tokens": 3},
        "optim": {"lr": 1e-2, "schedule": "constant", "warmup_steps": 0},
    }
    (tmp_path / "c.yaml").write_text(json.dumps(values))
    train(load_config(tmp_path / "c.yaml"), log=lambda _: None)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if line["kind"] == "train"], tmp_path / "run"
