"""What a saved folder says twice, or where other readers do not look, they read as it is here."""

import json

from forge_mlx.hub.pretrained import load_pretrained, save_pretrained
import mlx.core as mx
import numpy as np
import pytest
from tiny_hub_model import CHATML, write_hub_model
from tiny_models import hugging_face
import torch

TOKENS = np.random.default_rng(3).integers(0, 300, (1, 24))


def quiet(line: str) -> None:
    raise AssertionError(line)


def test_a_processors_chat_template_is_one_of_the_tokenizer(tmp_path):
    folder, again = write_hub_model(tmp_path / "model", None), tmp_path / "again"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    assert hugging_face().AutoTokenizer.from_pretrained(folder).chat_template is None
    opened = load_pretrained(folder, log=quiet)
    lines = []
    save_pretrained(again, opened.model, opened.tokenizer, source=opened.config, log=lines.append)
    assert [line for line in lines if "chat_template.jinja: holds the chat template too" in line]
    assert hugging_face().AutoTokenizer.from_pretrained(again).chat_template == CHATML
    assert (again / "chat_template.json").read_bytes() == (folder / "chat_template.json").read_bytes()
    assert load_pretrained(again, log=quiet).tokenizer.chat_template == CHATML


def test_two_bases_are_written_as_one(tmp_path):
    folder, again = write_hub_model(tmp_path / "model"), tmp_path / "again"
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 500000}, "note": 3}
    (folder / "config.json").write_text(json.dumps(config))
    opened = load_pretrained(folder, log=lambda _: None)
    written = save_pretrained(again, opened.model, opened.tokenizer, source=opened.config, log=lambda _: None)
    assert (written["rope_theta"], written["rope_parameters"]["rope_theta"], written["note"]) == (5e5, 5e5, 3)
    theirs = hugging_face().AutoModelForCausalLM.from_pretrained(again).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(np.array(opened.model(mx.array(TOKENS))), expected, atol=1e-4)
    mlx_lm = pytest.importorskip("mlx_lm", reason="it needs Python 3.11")
    model, _ = mlx_lm.load(str(again))
    np.testing.assert_allclose(np.array(model(mx.array(TOKENS))), expected, atol=1e-4)
