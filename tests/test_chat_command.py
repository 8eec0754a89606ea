"""Conversations: each turn as a fresh run of the whole text, the cache that is kept, and the command in a terminal."""

from contextlib import closing
from functools import partial
import io
import json
import os
from pathlib import Path
import select
import signal
import subprocess
import sys
import time

from forge_mlx import chat, generate
from forge_mlx.chat import Conversation
from forge_mlx.data.chat import render_prompt
from forge_mlx.data.tokenizer import Tokenizer
from forge_mlx.generate import main
from forge_mlx.hub.adapter_files import save_adapters
from forge_mlx.hub.native import save_model
from forge_mlx.models.adapter_config import AdapterConfig
from forge_mlx.models.adapters import add_adapters
from forge_mlx.models.gpt import GPT, GPTConfig
from forge_mlx.sampling import Sampler, generate_tokens
import mlx.core as mx
import pytest
from tiny_hub_model import CHATML, TEXT, tiny_model, tiny_tokenizer, write_hub_model

GREEDY = Sampler(0)
TURNS = ["hello number 3", "and größe?", "good day, model 🙂", "x"]
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
# As templates of reasoning models: of earlier answers only a part stays.
FORGETS = CHATML.replace("message['content']", "(message['content'] if loop.last else message['content'][:5])")
FAMILIES = {
    "rope": {},
    "window": {"sliding_window": 16},
    "learned": {"position": "learned", "norm": "layer_norm", "mlp": "gelu", "bias": True},
    "token shift": {"token_shift": True},
}
ROOT = Path(__file__).parents[1]


class Watched:
    """A model that notes how many tokens it reads at a time, and can fail in the middle of it."""

    def __init__(self, model):
        self._model, self.config, self.make_cache, self.head = model, model.config, model.make_cache, model.head
        self.lengths: list[int] = []
        self.fail_at = 0

    def hidden(self, tokens, cache=None):
        self.lengths.append(tokens.shape[1])
        if len(self.lengths) == self.fail_at:
            # Some layers have read the tokens and others have not.
            self._model.layers[0](self._model.embed_tokens(tokens), cache[0])
            raise KeyboardInterrupt
        return self._model.hidden(tokens, cache)


class Reciting:
    """Says a script, whatever it is asked, and keeps a true cache."""

    def __init__(self, model, script):
        self._model, self.config, self.make_cache = model, model.config, model.make_cache
        self.script = list(script)
        self.lengths: list[int] = []

    def hidden(self, tokens, cache=None):
        self.lengths.append(tokens.shape[1])
        return self._model.hidden(tokens, cache)

    def head(self, _hidden):
        return mx.where(mx.arange(300) == self.script.pop(0), 1.0, 0.0)[None]


def said(conversation, message):
    return "".join(conversation.answer(message))


def fresh(model, tokenizer, messages, most):
    """The answer when the whole conversation is read anew for every token."""
    prompt = render_prompt(tokenizer, messages)
    tokens = generate_tokens(model, prompt, GREEDY, most, stop=tokenizer.stop_ids, use_cache=False)
    return tokenizer.decode(tokens)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("template", [CHATML, FORGETS], ids=["chatml", "forgets"])
def test_each_turn_is_a_fresh_run(family, template):
    model, tokenizer = tiny_model(**FAMILIES[family]), tiny_tokenizer(template)
    conversation = Conversation(model, tokenizer, GREEDY, max_tokens=9)
    conversation.reset("speak of numbers")
    messages = [{"role": "system", "content": "speak of numbers"}]
    for turn in TURNS[:3]:
        messages = [*messages, {"role": "user", "content": turn}]
        want = fresh(model, tokenizer, messages, 9)
        assert said(conversation, turn) == want
        messages = [*messages, {"role": "assistant", "content": want}]
        assert conversation.messages == messages


def test_only_what_is_new_is_read():
    tokenizer = tiny_tokenizer()
    first, second = "good day, größe 4!", "hello number 7"
    end = tokenizer.token_id("<|im_end|>")
    script = [*tokenizer.encode(first), end, *tokenizer.encode(second), end]
    model = Reciting(tiny_model(), script)
    conversation = Conversation(model, tokenizer, GREEDY, max_tokens=40)
    assert said(conversation, "hello") == first
    prompt = render_prompt(tokenizer, conversation.messages[:1])
    answer = len(tokenizer.encode(first))
    assert model.lengths == [len(prompt)] + [1] * answer
    model.lengths.clear()
    assert said(conversation, "and you?") == second
    whole = render_prompt(tokenizer, conversation.messages[:3])
    # Prompt and answer are held; the end of the turn is where the model stopped, and was never read.
    assert model.lengths[0] == len(whole) - len(prompt) - answer
    assert not conversation.was_cut
    # The same again from the start: the prompt is known but for its last token, which gives the first choice.
    conversation.reset()
    model.lengths.clear()
    model.script = [*tokenizer.encode(first), end]
    assert said(conversation, "hello") == first
    assert model.lengths[0] == 1


def test_an_answer_that_is_stopped_stays_as_far_as_it_came():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    conversation = Conversation(model, tokenizer, GREEDY, max_tokens=30)
    with closing(conversation.answer("hello")) as pieces:
        part = next(pieces) + next(pieces)
    user = {"role": "user", "content": "hello"}
    assert conversation.messages == [user, {"role": "assistant", "content": part}]
    messages = [*conversation.messages, {"role": "user", "content": "go on"}]
    assert said(conversation, "go on") == fresh(model, tokenizer, messages, 30)
    before = list(conversation.messages)
    conversation.answer("never asked for").close()
    assert conversation.messages == before


@pytest.mark.parametrize("fail_at", [1, 2, 4])
@pytest.mark.parametrize("family", ["rope", "token shift"])
def test_an_interrupt_inside_the_model_leaves_the_cache_sound(fail_at, family):
    model, tokenizer = tiny_model(**FAMILIES[family]), tiny_tokenizer()
    watched = Watched(model)
    conversation = Conversation(watched, tokenizer, GREEDY, max_tokens=9)
    said(conversation, "hello number 3")
    watched.fail_at = len(watched.lengths) + fail_at
    with pytest.raises(KeyboardInterrupt):
        said(conversation, "hello number 3, number 4, number 5")
    messages = [*conversation.messages, {"role": "user", "content": "and größe?"}]
    assert len(conversation.messages) == (2 if fail_at == 1 else 4)
    assert said(conversation, "and größe?") == fresh(model, tokenizer, messages, 9)


def test_learned_positions_end():
    tokenizer = tiny_tokenizer()
    model = Watched(tiny_model(**FAMILIES["learned"], max_seq_len=40))
    conversation = Conversation(model, tokenizer, GREEDY, max_tokens=100)
    length = len(render_prompt(tokenizer, [{"role": "user", "content": "hi"}]))
    said(conversation, "hi")
    # The last token is not read any more.
    assert model.lengths == [length] + [1] * (40 - length - 1)
    assert conversation.was_cut
    before = list(conversation.messages)
    with pytest.raises(ValueError, match=r"must be shorter than the model's 40 positions but has \d+ tokens\. /reset "):
        conversation.answer("hello number 4" * 5)
    assert conversation.messages == before
    conversation.reset()
    said(conversation, "hi")


def test_other_positions_go_on_with_one_warning():
    warnings = []
    model, tokenizer = tiny_model(max_seq_len=40), tiny_tokenizer()
    conversation = Conversation(model, tokenizer, GREEDY, max_tokens=12, warn=warnings.append)
    for turn in TURNS:
        said(conversation, turn)
    (warning,) = warnings
    assert warning.endswith(
        "tokens of conversation exceed the 40 tokens that the model was trained on; quality falls there"
    )


@pytest.mark.parametrize("past", [0, 1])
def test_an_answer_that_could_have_been_too_long_is_no_warning(past):
    model, tokenizer = tiny_model(max_seq_len=40), tiny_tokenizer()
    warnings = []
    room = 40 - len(render_prompt(tokenizer, [{"role": "user", "content": "hi"}]))
    (letter,) = tokenizer.encode("g")
    reciting = Reciting(model, [letter] * (room + past) + [tokenizer.end_id])
    conversation = Conversation(reciting, tokenizer, GREEDY, max_tokens=100, warn=warnings.append)
    assert said(conversation, "hi") == "g" * (room + past)
    assert len(warnings) == past


def test_a_system_message_that_the_template_refuses_changes_nothing():
    conversation = Conversation(tiny_model(), tiny_tokenizer(NO_SYSTEM), GREEDY, max_tokens=3)
    said(conversation, "hello")
    before = list(conversation.messages)
    with pytest.raises(ValueError, match="no system role"):
        conversation.reset("be brief")
    assert conversation.messages == before
    assert conversation.system is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_hub_model(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture
def command(call_main):
    return partial(call_main, main)


def greedy(turns, most, system=None):
    """What the model answers to each turn."""
    conversation = Conversation(tiny_model(), tiny_tokenizer(), GREEDY, max_tokens=most)
    conversation.reset(system)
    return [said(conversation, turn) for turn in turns]


def test_one_answer(folder, command):
    arguments = ("--chat", "--temperature", 0, "--max-tokens", 12, "--prompt", TURNS[0])
    status, out, err = command(folder, *arguments)
    assert (status, out) == (0, greedy(TURNS[:1], 12)[0] + "\n")
    assert err == f"[{folder}]\nthe answer was cut; a larger --max-tokens allows longer ones\n"
    assert command(folder, *arguments, "--system", "be brief")[1] == greedy(TURNS[:1], 12, "be brief")[0] + "\n"


def test_turns_and_commands_from_a_pipe(folder, command, monkeypatch):
    lines = [
        *TURNS[:2],
        "",
        "/reset",
        TURNS[1],
        "/system be brief",
        TURNS[0],
        "/system",
        "/help",
        "/x y",
        " /x",
        "/exit",
    ]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([*lines, "never read"])))
    status, out, err = command(folder, "--chat", "--temperature", 0, "--max-tokens", 12)
    turns = [
        *greedy(TURNS[:2], 12),
        *greedy(TURNS[1:2], 12),
        *greedy([TURNS[0], " /x"], 12, "be brief"),
    ]
    assert status == 0
    assert out == "".join(turn + "\n" for turn in turns)
    notes = [line for line in err.splitlines() if not line.startswith("the answer was cut")]
    assert notes == [
        f"[{folder}]",
        "a new conversation",
        "a new conversation with this system message",
        "system message: be brief; /system TEXT sets one",
        chat._HELP,
        f"there is no command /x; to say it, begin with a space. {chat._HELP}",
    ]


def test_what_the_template_refuses_does_not_end_the_conversation(tmp_path, command, monkeypatch):
    folder = write_hub_model(tmp_path / "model", NO_SYSTEM)
    monkeypatch.setattr(sys, "stdin", io.StringIO("/system be brief\nhello\n"))
    status, out, err = command(folder, "--chat", "--max-tokens", 3)
    assert status == 0
    assert "no system role" in err
    assert out.count("\n") >= 1
    status, out, err = command(folder, "--chat", "--max-tokens", 3, "--system", "be brief", "--prompt", "hello")
    assert (status, out) == (2, "")
    assert "no system role" in err


def test_what_cannot_chat(tmp_path, command):
    tokenizer = Tokenizer.train([TEXT], kind="bpe", vocab_size=300)
    (tmp_path / "own").mkdir()
    save_model(tmp_path / "own", GPT(GPTConfig(vocab_size=300, num_layers=1, hidden_size=16, num_heads=2)), tokenizer)
    status, out, err = command(tmp_path / "own", "--chat", "--prompt", "x")
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {tmp_path / 'own'}: --chat needs a tokenizer with a chat template")
    bare = write_hub_model(tmp_path / "bare", None)
    status, out, err = command(bare, "--chat", "--prompt", "x")
    assert (status, out) == (2, "")
    assert "template" in err.splitlines()[-1]
    assert command(bare, "--system", "x") == (2, "", "error: --system needs --chat.\n")
    status, _, err = command(bare, "--chat", "--max-tokens", 0)
    assert (status, err) == (2, "error: --max-tokens must be at least 1 but got 0.\n")


def test_plain_text_of_a_hub_model(folder, command):
    tokens = tiny_tokenizer().encode("hello")
    want = tiny_tokenizer().decode(generate_tokens(tiny_model(), tokens, GREEDY, 10, stop={0, 2}))
    status, out, err = command(folder, "--prompt", "hello", "--temperature", 0, "--max-tokens", 10)
    assert (status, out, err) == (0, f"hello{want}\n", f"[{folder}]\n")


def test_adapters_are_put_on_the_model(folder, tmp_path, command):
    config = AdapterConfig(rank=4, targets=["q_proj", "down_proj"])
    model = add_adapters(tiny_model(), config, seed=0)
    for layer in model.layers:
        layer.mlp.down_proj.lora_b = mx.random.normal(layer.mlp.down_proj.lora_b.shape, key=mx.random.key(3))
    save_adapters(tmp_path / "adapters", model, config, str(folder))
    model.eval()
    want = [said(Conversation(net, tiny_tokenizer(), GREEDY, max_tokens=12), TURNS[0]) for net in (model, tiny_model())]
    assert want[0] != want[1]
    arguments = ("--chat", "--temperature", 0, "--max-tokens", 12, "--prompt", TURNS[0])
    assert command(folder, "--adapter", tmp_path / "adapters", *arguments)[:2] == (0, want[0] + "\n")
    status, out, err = command(folder, "--adapter", tmp_path / "none", *arguments)
    assert (status, out) == (2, "")
    assert str(tmp_path / "none") in err


SAMPLES = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": 0}
GREEDY_FILE = {"do_sample": False, "temperature": 0.6, "top_p": None}


@pytest.mark.parametrize("chats", [True, False], ids=["chat", "text"])
@pytest.mark.parametrize(
    ("file", "arguments", "sampler", "said"),
    [
        (SAMPLES, (), Sampler(0.6, 20, 0.9), "temperature 0.6, top_k 20, top_p 0.9"),
        (SAMPLES, ("--temperature", 0.3, "--min-p", 0.1), Sampler(0.3, 20, 0.9, 0.1), "top_k 20, top_p 0.9"),
        (SAMPLES, ("--temperature", 1, "--top-k", 0, "--top-p", 1), Sampler(1.0, 0, 1.0), None),
        (GREEDY_FILE, (), Sampler(0.0, 0, 0.95), "greedy"),
        (GREEDY_FILE, ("--top-p", 0.5), Sampler(0.6, 0, 0.5), "temperature 0.6"),
        ({"eos_token_id": 0}, (), Sampler(0.8, 0, 0.95), None),
    ],
    ids=["samples", "some are given", "all are given", "greedy", "greedy but asked", "says nothing"],
)
def test_what_is_not_given_is_as_the_model_says(tmp_path, command, monkeypatch, chats, file, arguments, sampler, said):
    folder = write_hub_model(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(file), encoding="utf-8")
    seen = []
    for module in (chat, generate):
        monkeypatch.setattr(module, "generate_tokens", lambda *args, **_: seen.append(args[2]) or iter([]))
    status, _, err = command(folder, *(("--chat",) if chats else ()), "--prompt", "hello", *arguments)
    assert (status, seen) == (0, [sampler])
    lines = [line for line in err.splitlines() if "generation_config.json" in line]
    assert lines == ([] if said is None else [f"as the model's generation_config.json says: {said}"])


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"temperature": "hot"}, "temperature must be a number but is 'hot'. Give --temperature."),
        ({"top_k": -1, "top_p": 0.9}, "but got -1. Give --top-k, --top-p."),
    ],
    ids=["a word", "out of range"],
)
def test_sampling_that_a_model_cannot_mean(tmp_path, command, file, message):
    folder = write_hub_model(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(file), encoding="utf-8")
    status, out, err = command(folder, "--prompt", "hello")
    assert (status, out) == (2, "")
    assert err.startswith("error: generation_config.json of the model cannot be followed: ")
    assert err.endswith(message + "\n")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_in_a_terminal(folder):
    """Ctrl-C stops an answer, at the prompt it explains itself, and Ctrl-D ends."""
    import pty

    leader, follower = pty.openpty()
    arguments = [sys.executable, "-m", "forge_mlx.generate", str(folder), "--chat", "--max-tokens", "100000"]
    process = subprocess.Popen(
        arguments, stdin=follower, stdout=follower, stderr=follower, cwd=ROOT, start_new_session=True
    )
    os.close(follower)
    unread = b""

    def until(what, least=0):
        """Read on to behind what must come, after so many bytes at least."""
        nonlocal unread
        deadline = time.monotonic() + 60
        while (at := unread.find(what, least)) < 0:
            assert time.monotonic() < deadline, unread
            if select.select([leader], [], [], 1)[0]:
                unread += os.read(leader, 4096)
        unread = unread[at + len(what) :]

    until(b"/reset begins anew")
    until(b"> ")
    os.write(leader, b"hello\n")
    until(b"hello")
    until(b"", 300)
    process.send_signal(signal.SIGINT)
    until(b"stopped")
    until(b"> ")
    process.send_signal(signal.SIGINT)
    until(b"/exit or Ctrl-D ends")
    until(b"> ")
    os.write(leader, b"\x04")
    assert process.wait(60) == 0
    os.close(leader)
