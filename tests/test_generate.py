from functools import partial
import os
from pathlib import Path
import shutil
import subprocess
import sys
from types import SimpleNamespace

from forge_mlx import generate
from forge_mlx.data.tokenizer import Tokenizer
from forge_mlx.generate import main, stream_text
from forge_mlx.hub.native import ModelFolderError, save_model
from forge_mlx.models.gpt import GPT, GPTConfig
from forge_mlx.opened_model import OpenedModel, open_model
from forge_mlx.sampling import Sampler
from forge_mlx.train.load import load_config
from forge_mlx.train.loop import train
import mlx.core as mx
import pytest

CONFIG = """\
run: {dir: RUN, device: cpu}
data: {source: [CORPUS], tokenizer: {vocab_size: 300}}
model: {num_layers: 1, hidden_size: 16, num_heads: 2, max_seq_len: 32}
train: {steps: 4, batch_size: 2, seq_len: 16, checkpoint_every: 2, sample_tokens: 4, final_eval_tokens: 64}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a finished run of four steps."""
    folder = tmp_path_factory.mktemp("generate")
    corpus = folder / "corpus.txt"
    corpus.write_text("".join(f"def größe_{i}(x):\n    return x + {i}  # 🙂\n" for i in range(300)), encoding="utf-8")
    config = folder / "c.yaml"
    config.write_text(CONFIG.replace("RUN", str(folder / "run")).replace("CORPUS", str(corpus)), encoding="utf-8")
    train(load_config(config), log=lambda _: None)
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def command(call_main):
    return partial(call_main, main)


def model_folder(path, trained, **changes):
    config = {"vocab_size": 300, "num_layers": 1, "hidden_size": 16, "num_heads": 2, "max_seq_len": 32, **changes}
    path.mkdir()
    save_model(path, GPT(GPTConfig.model_validate(config), seed=1), Tokenizer.load(trained / "tokenizer.model"))
    return path


def test_continues_a_prompt_with_the_final_model(trained, command):
    status, out, err = command(trained, "--prompt", "def ", "--max-tokens", 9, "--seed", 3)
    assert status == 0
    assert out.startswith("def ")
    assert out.endswith("\n")
    assert len(out) > len("def \n")
    assert err == f"[{trained / 'final'}]\n"
    assert command(trained / "final", "--prompt", "def ", "--max-tokens", 9, "--seed", 3)[1] == out
    assert command(trained, "--prompt", "def ", "--max-tokens", 9, "--seed", 4)[1] != out


def test_without_a_prompt_a_document_begins(trained, command):
    status, out, _ = command(trained, "--max-tokens", 5, "--temperature", 0)
    assert status == 0
    assert out.endswith("\n")


def test_the_options_reach_the_sampler(trained, command, monkeypatch):
    seen = []
    monkeypatch.setattr(generate, "generate_tokens", lambda *args, **named: seen.append((args, named)) or iter([]))
    command(trained, "--max-tokens", 7, "--temperature", 0.5, "--top-k", 4, "--top-p", 0.7, "--min-p", 0.1, "--seed", 9)
    command(trained, "--max-tokens", 7)
    (_, tokens, sampler, count), named = seen[0]
    end = Tokenizer.load(trained / "tokenizer.model").end_id
    assert sampler == Sampler(0.5, 4, 0.7, 0.1)
    assert (tokens, count, named) == ([end], 7, {"stop": {end}, "vocab_size": 300, "seed": 9})
    assert seen[1][0][2] == Sampler(0.8, 0, 0.95, 0.0)


def test_an_unfinished_run_gives_its_newest_checkpoint(run, command):
    shutil.rmtree(run / "final")
    status, _, err = command(run, "--prompt", "def ", "--max-tokens", 6)
    assert status == 0
    assert err == f"[{run / 'checkpoints' / 'step-00000004'}]\n"
    model, tokenizer, *_ = open_model(run)
    assert not model.training
    saved = mx.load(str(run / "checkpoints/step-00000004/model.safetensors"))
    assert mx.array_equal(model.embed_tokens.weight, saved["embed_tokens.weight"])
    assert tokenizer.vocab_size == model.config.vocab_size == 300
    shutil.rmtree(run / "checkpoints/step-00000004")
    assert command(run, "--max-tokens", 6)[2] == f"[{run / 'checkpoints' / 'step-00000002'}]\n"


def test_a_folder_that_is_not_there(tmp_path, command):
    missing = tmp_path / "runs" / "none"
    message = "there is no such file or folder, and it is no OWNER/NAME of a model on the hub."
    assert command(missing) == (2, "", f"error: {missing}: {message}\n")


def test_a_folder_without_a_model(tmp_path, run, command):
    message = "is neither a model folder nor a run folder with a checkpoint."
    assert command(tmp_path) == (2, "", f"error: {tmp_path}: {message}\n")
    shutil.rmtree(run / "final")
    shutil.rmtree(run / "checkpoints")
    assert command(run) == (2, "", f"error: {run}: {message}\n")


def test_damaged_weights_are_named(run, command):
    for file in (run / "final/model.safetensors", run / "checkpoints/step-00000004/model.safetensors"):
        file.write_bytes(file.read_bytes()[:100])
        status, out, err = command(run)
        assert (status, out) == (2, "")
        assert err.startswith(f"error: {file}: is damaged or of another model: ")
        shutil.rmtree(run / "final", ignore_errors=True)


def test_settings_outside_their_range_are_errors(trained, command):
    for arguments, message in [
        (("--top-p", 0), "[Sampler] top_p must lie in (0, 1] (1: off) but got 0.0."),
        (("--temperature", -1), "[Sampler] temperature must be at least 0 and finite but got -1.0."),
        (("--max-tokens", 0), "--max-tokens must be at least 1 but got 0."),
    ]:
        assert command(trained, *arguments) == (2, "", f"error: {message}\n")


def test_learned_positions_end(trained, tmp_path, command):
    folder = model_folder(tmp_path / "learned", trained, position="learned")
    tokens = len(Tokenizer.load(trained / "tokenizer.model").encode("def größe"))
    fits = 32 - tokens
    assert command(folder, "--prompt", "def größe", "--max-tokens", fits)[0] == 0
    assert command(folder, "--prompt", "def größe", "--max-tokens", fits + 1) == (
        2,
        "",
        f"error: the model has 32 learned positions but got {tokens} tokens of prompt and {fits + 1} of text. "
        f"Use --max-tokens {fits} or less.\n",
    )
    status, out, err = command(folder, "--prompt", "def größe_1(x):\n" * 30)
    assert (status, out) == (2, "")
    assert err.endswith("Use a shorter prompt.\n")


@pytest.mark.parametrize("position", ["rope", "none"])
def test_other_positions_go_on_with_one_warning(trained, tmp_path, command, position):
    folder = model_folder(tmp_path / position, trained, position=position)
    status, out, err = command(folder, "--prompt", "def ", "--max-tokens", 60, "--temperature", 2.0, "--top-p", 1)
    assert status == 0
    tokens = len(Tokenizer.load(trained / "tokenizer.model").encode("def "))
    assert err.splitlines() == [
        f"warning: {tokens} tokens of prompt and 60 of text may exceed the 32 tokens that the model was trained on; "
        "quality falls there",
        f"[{folder}]",
    ]
    assert len(out) > 60
    assert command(folder, "--max-tokens", 31)[2] == f"[{folder}]\n"


def test_characters_of_several_bytes_come_whole(trained):
    tokenizer = Tokenizer.load(trained / "tokenizer.model")
    text = "naïve 中🙃é\n"
    script = [*tokenizer.encode(text), tokenizer.end_id]
    assert len(script) > len(text) + 1

    class Reciting:
        """Says the script, whatever it is asked."""

        config = SimpleNamespace(max_seq_len=1000, position="rope")

        def make_cache(self):
            return []

        def hidden(self, _tokens, cache):
            assert cache == []
            token = script.pop(0)
            return mx.where(mx.arange(tokenizer.vocab_size) == token, 1.0, 0.0)[None, None]

        def head(self, hidden):
            return hidden

    reciting = OpenedModel(Reciting(), tokenizer, Path("folder"), False)
    pieces = list(stream_text(reciting, "x", Sampler(0), 100, 0, warn=pytest.fail))
    assert "".join(pieces) == text
    assert script == []
    assert "�" not in pieces
    assert "中" in pieces
    script += tokenizer.encode("中")[:2]
    cut = stream_text(reciting, "x", Sampler(0), 2, 0, warn=pytest.fail)
    assert "".join(cut) == "�"


def test_a_prompt_that_is_not_unicode_is_an_error(trained, command):
    status, out, err = command(trained, "--prompt", "a\udcff")
    assert (status, out) == (2, "")
    assert "lone surrogate" in err


def test_ctrl_c_ends_the_line(trained, command, monkeypatch):
    def interrupted(*_args, **_named):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(generate, "generate_tokens", interrupted)
    status, out, _ = command(trained, "--prompt", "def ")
    assert (status, out) == (130, "def \n")


def test_a_reader_that_leaves_early_is_no_error(trained):
    process = subprocess.Popen(
        [sys.executable, "-m", "forge_mlx.generate", str(trained), "--prompt", "x", "--max-tokens", "300"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
    )
    assert process.stdout.read(1) == b"x"
    process.stdout.close()
    err = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(60) == 0
    assert [line for line in err.splitlines() if not line.startswith(("[", "warning: "))] == []


def test_open_model_says_which_folder(trained):
    assert open_model(trained)[2] == trained / "final"
    assert open_model(trained / "final")[2] == trained / "final"
    with pytest.raises(ModelFolderError):
        open_model(trained / "checkpoints")


def test_seed_outside_its_range_is_an_error(trained, command):
    for seed in (-1, 2**63):
        status, _, err = command(trained, "--prompt", "def ", "--seed", seed)
        assert status == 2
        assert err.endswith(f"error: [generate_tokens] seed must lie in [0, 2^63) but got {seed}.\n")


def test_one_checkpoint_can_be_named(run, command):
    checkpoint = run / "checkpoints" / "step-00000002"
    status, _, err = command(checkpoint, "--prompt", "def ", "--max-tokens", 5)
    assert (status, err) == (0, f"[{checkpoint}]\n")


def test_text_that_ends_at_once_is_said_to(trained, command, monkeypatch):
    monkeypatch.setattr("forge_mlx.generate.generate_tokens", lambda *_args, **_options: iter(()))
    status, out, err = command(trained, "--prompt", "def ")
    assert (status, out) == (0, "def \n")
    assert err.splitlines()[-1].startswith("the model ended the text at once")


def test_prompt_stands_alone_and_nothing_is_the_end_token(trained):
    tokenizer = Tokenizer.load(trained / "tokenizer.model")
    seen = []

    class Listening:
        config = SimpleNamespace(max_seq_len=1000, position="rope")

        def make_cache(self):
            return []

        def hidden(self, tokens, **_cache):
            seen.append(tokens.tolist()[0])
            return mx.zeros((1, tokens.shape[1], tokenizer.vocab_size))

        def head(self, hidden):
            return hidden

    for first in (False, True):
        opened = OpenedModel(Listening(), tokenizer, Path("folder"), first)
        for prompt in ("def ", ""):
            list(stream_text(opened, prompt, Sampler(), 1, 0, warn=lambda _: None))
    end, tokens = tokenizer.end_id, tokenizer.encode("def ")
    assert seen == [tokens, [end], [end, *tokens], [end]]


def test_output_that_cannot_hold_a_character_replaces_it(trained):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    arguments = [sys.executable, "-m", "forge_mlx.generate", str(trained), "--prompt", "größe", "--max-tokens", "3"]
    done = subprocess.run(arguments, env=environment, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"gr??e")


def test_a_model_of_packed_documents_reads_the_end_token_first(trained, tmp_path, command, monkeypatch):
    """By its final folder, and by its run's config where it has none yet."""
    shutil.copytree(trained, tmp_path / "run")
    run = tmp_path / "run"
    seen = []
    monkeypatch.setattr(generate, "generate_tokens", lambda _model, tokens, *_args, **_named: seen.append(tokens) or [])
    command(run, "--prompt", "def ")
    for file, old, new in (
        (run / "config.yaml", "packing: concat", "packing: documents"),
        (run / "final/config.json", "{", '{"texts_begin_with_end": true,'),
    ):
        text = file.read_text(encoding="utf-8")
        assert old in text
        file.write_text(text.replace(old, new, 1), encoding="utf-8")
    command(run, "--prompt", "def ")
    command(run / "checkpoints/step-00000004", "--prompt", "def ")
    shutil.rmtree(run / "final")
    command(run, "--prompt", "def ")
    tokenizer = Tokenizer.load(trained / "tokenizer.model")
    prompt = tokenizer.encode("def ")
    assert seen == [prompt] + 3 * [[tokenizer.end_id, *prompt]]
