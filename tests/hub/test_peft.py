"""Adapters go to PEFT and come from it: the same logits in PyTorch as here, and what has no counterpart is refused."""

import json

from forge_mlx.adapter import main
from forge_mlx.hub.adapter_files import load_adapters, save_adapters
from forge_mlx.hub.errors import HubError
from forge_mlx.hub.peft import from_peft, to_peft
from forge_mlx.models.adapters import AdapterConfig, adapted_layers
import mlx.core as mx
import numpy as np
import peft
import pytest
from taught_adapters import assert_alike, bases, opened, taught
from tiny_models import V
import torch
import transformers

TOKENS = np.random.default_rng(5).integers(0, V, (2, 9))
# Of transformers about PEFT's calls, and PEFT's about a table that gets an adapter.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
    "ignore:Setting `save_embedding_layers`:UserWarning",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return bases(tmp_path_factory)


def in_torch(base, adapter):
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, adapter).eval()
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


CASES = {
    "lora": ("llama", AdapterConfig(rank=3, alpha=5.0)),
    "dora": ("llama, biases", AdapterConfig(method="dora", rank=3, alpha=5.0, layers=2)),
    "rslora": ("qwen3", AdapterConfig(method="rslora", rank=3, alpha=5.0, targets=["q_proj", "down_proj"])),
    "table": ("llama", AdapterConfig(rank=2, targets=["embed_tokens", "lm_head", "v_proj"])),
    "gemma3": ("gemma3_text", AdapterConfig(rank=2)),
    "tied table": ("llama, biases", AdapterConfig(rank=2, targets=["embed_tokens", "v_proj"])),
}


@pytest.mark.parametrize(
    "case",
    [
        "dora",
        "tied table",
        *(pytest.param(n, marks=pytest.mark.slow) for n in CASES if n not in ("dora", "tied table")),
    ],
)
def test_peft_computes_what_we_do_and_back_they_are_the_same(tmp_path, folders, case):
    family, config = CASES[case]
    base = folders(family)
    model = taught(opened(base), config)
    expected = model(mx.array(TOKENS))
    save_adapters(tmp_path / "ours", model, config, str(base))
    to_peft(tmp_path / "ours", tmp_path / "peft")
    assert_alike(in_torch(base, tmp_path / "peft"), expected)
    from_peft(tmp_path / "peft", tmp_path / "back")
    again = opened(base)
    read = load_adapters(tmp_path / "back", again)
    assert mx.array_equal(again(mx.array(TOKENS)), expected)
    assert (read.method, read.rank, read.alpha) == (config.method, config.rank, pytest.approx(config.alpha))


def of_peft_with(base, folder, **options):
    """Logits of a model with random adapters of PEFT's own, which `folder` gets."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", init_lora_weights=False, **options)
    model = peft.get_peft_model(model, config).eval()
    model.save_pretrained(folder)
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


OF_PEFT = {
    "lora": {"target_modules": ["q_proj", "down_proj"]},
    "dora": {"target_modules": "all-linear", "use_dora": True},
    "rslora": {"target_modules": ["v_proj"], "use_rslora": True, "layers_to_transform": [1, 2]},
    "table": {"target_modules": ["embed_tokens", "q_proj"]},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", OF_PEFT)
def test_what_peft_wrote_computes_the_same_here(tmp_path, folders, case, call_main):
    base = folders("llama")
    expected = of_peft_with(base, tmp_path / "peft", **OF_PEFT[case])
    status, out, _ = call_main(main, "from-peft", tmp_path / "peft", tmp_path / "ours")
    assert status == 0
    assert ("1 whole embedding table beside the adapters left out" in out) == (case == "table")
    ours = opened(base)
    plain = np.array(ours(mx.array(TOKENS)))
    load_adapters(tmp_path / "ours", ours)
    assert np.abs(expected - plain).max() > 0.1
    assert_alike(ours(mx.array(TOKENS)), expected)
    status, _, _ = call_main(main, "to-peft", tmp_path / "ours", tmp_path / "again")
    assert status == 0
    assert_alike(in_torch(base, tmp_path / "again"), expected)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer:UserWarning")
def test_an_embedding_s_adapter_that_a_tied_head_has_not_is_an_error(tmp_path, folders):
    base = folders("llama, biases")
    of_peft_with(base, tmp_path / "peft", target_modules=["embed_tokens", "q_proj"])
    with pytest.raises(HubError, match=r"ensure_weight_tying must be true for an adapter of embed_tokens in .*, whose"):
        from_peft(tmp_path / "peft", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    file = tmp_path / "peft" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "somebody/elsewhere"}))
    from_peft(tmp_path / "peft", tmp_path / "ours")
    model = opened(base)
    with pytest.raises(
        HubError, match="is for the lookup alone, as PEFT trained it, so the head must be a matrix of it"
    ):
        load_adapters(tmp_path / "ours", model)
    assert not adapted_layers(model)


def test_an_embedding_s_adapter_that_peft_tied_computes_the_same_here(tmp_path, folders):
    base = folders("llama, biases")
    expected = of_peft_with(
        base, tmp_path / "peft", target_modules=["embed_tokens", "q_proj"], ensure_weight_tying=True
    )
    from_peft(tmp_path / "peft", tmp_path / "ours")
    ours = opened(base)
    load_adapters(tmp_path / "ours", ours)
    assert_alike(ours(mx.array(TOKENS)), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("qwen3_moe", AdapterConfig(rank=2, targets=["*.experts.*"]), "has stacked experts"),
        ("llama", AdapterConfig(rank=2, method="dora", targets=["embed_tokens"]), "must be without magnitudes"),
        ("gpt2", AdapterConfig(rank=2, targets=["up_proj"]), "there are some of model.h.0.mlp.c_fc"),
    ],
    ids=["experts", "table of a dora", "gpt2"],
)
def test_what_peft_has_not_is_an_error(tmp_path, folders, family, config, message):
    save_adapters(tmp_path / "ours", taught(opened(folders(family)), config), config, family)
    with pytest.raises(HubError) as error:
        to_peft(tmp_path / "ours", tmp_path / "peft")
    assert message in str(error.value)
    assert not (tmp_path / "peft").exists()


CHANGES = {
    "no peft_type": ({"peft_type": ...}, "peft_type must be LORA but is missing"),
    "another method": ({"peft_type": "IA3"}, "peft_type must be 'LORA' to be converted but got 'IA3'"),
    "ranks": ({"rank_pattern": {"q_proj": 4}}, "rank_pattern must be {} to be converted but got {'q_proj': 4}"),
    "biases": ({"bias": "all"}, "bias must be 'none'"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save must be None"),
    "no rank": ({"r": None}, "r must be a number greater than 0 but got None"),
    "alpha": ({"lora_alpha": "8"}, "lora_alpha must be a number greater than 0 but got '8'"),
}


@pytest.fixture(scope="module")
def of_peft(tmp_path_factory, folders):
    config = AdapterConfig(rank=2, targets=["q_proj"])
    home = tmp_path_factory.mktemp("converted")
    save_adapters(home / "ours", taught(opened(folders("llama, biases")), config), config, "base")
    to_peft(home / "ours", home / "peft")
    return home / "peft"


@pytest.mark.parametrize("change", CHANGES)
def test_what_cannot_be_converted_is_one_clear_line(tmp_path, of_peft, change):
    changes, message = CHANGES[change]
    folder = tmp_path / "peft"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes((of_peft / "adapter_model.safetensors").read_bytes())
    values = json.loads((of_peft / "adapter_config.json").read_text()) | changes
    values = {key: value for key, value in values.items() if value is not ...}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    with pytest.raises(HubError) as error:
        from_peft(folder, tmp_path / "ours")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "ours").exists()


def test_a_folder_of_the_other_layout_or_of_pickles_says_so(tmp_path, of_peft, folders):
    with pytest.raises(HubError, match=r"It is one of PEFT's: python -m forge_mlx\.adapter from-peft converts it"):
        load_adapters(of_peft, opened(folders("llama, biases")))
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(HubError, match=r"has no adapter_model\.safetensors\. adapter_model\.bin is a pickle"):
        from_peft(tmp_path, tmp_path / "ours")
