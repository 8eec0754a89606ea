"""Perplexity and choices against one forward pass for each target, and against transformers in float64."""

from functools import partial
import json
import math

from forge_mlx.data.chat import encode_chat
from forge_mlx.data.files import list_paths
from forge_mlx.data.tokenizer import Tokenizer
from forge_mlx.evaluate import main
from forge_mlx.evaluation import choices as choices_module
from forge_mlx.evaluation.choices import Question, encode_choices, score_choices
from forge_mlx.evaluation.rows import windows
from forge_mlx.evaluation.scoring import score
from forge_mlx.hub.native import save_model
from forge_mlx.models.gpt import GPT, GPTConfig
from forge_mlx.opened_model import open_model
from forge_mlx.train.loop import train
import mlx.core as mx
import numpy as np
import pytest
from tiny_hub_model import SHAPE, TEXT, tiny_model, tiny_tokenizer, write_hub_model

from tests.train.tiny_checkpoint import finetune_config

TEXTS = ["hello", "größe 4!", TEXT[:500], "x", "", TEXT[300:340]]
CHATS = [
    [("user", "hello"), ("assistant", "good day"), ("user", "and?"), ("assistant", "größe 4!")],
    [("system", "be brief"), ("user", "hello number 7"), ("assistant", "the model says: 49!")],
]
QUESTIONS = [
    {"question": "user says hello, and the model", "choices": ["says: good day", "größe", "x"], "answer": 0},
    {"prompt": "hello number ", "choices": ["3", "4 and the model says", "größe größe"], "answer": "B"},
    {"question": "", "choices": ["good", "day"], "answer": "day"},
    {"question": "größe", "choices": ["1", "0"], "answer": "0"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_hub_model(tmp_path_factory.mktemp("evaluate") / "model")


@pytest.fixture
def command(call_main):
    return partial(call_main, main)


def write_lines(path, records):
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def log_p(model, before, target):
    """ln p of one token behind some others, from logits of that text alone."""
    logits = np.array(model(mx.array([before])))[0, -1].astype(np.float64)
    return logits[target] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


def context(at, size, seq_len, stride):
    """How many tokens before the one at `at`, of `size`, it is predicted from, by what `windows` says."""
    if at <= seq_len:
        return at
    end = min(seq_len + math.ceil((at - seq_len) / stride) * stride, size - 1)
    return at - (end - seq_len)


def nats(model, ids, is_target, seq_len=256, stride=256):
    return -sum(
        log_p(model, ids[at - context(at, len(ids), seq_len, stride) : at], ids[at])
        for at in range(1, len(ids))
        if is_target[at]
    )


@pytest.mark.parametrize("size", [1, 2, 5, 8, 9, 10, 23, 64])
@pytest.mark.parametrize(("seq_len", "stride"), [(1, 1), (8, 8), (8, 3), (8, 1), (9, 5), (100, 7)])
def test_windows_count_each_target_once(size, seq_len, stride):
    ids = np.arange(size, dtype=np.int32)
    wanted = ids % 3 != 1
    seen = {}
    for row in windows(ids, wanted, seq_len, stride):
        assert len(row.inputs) <= seq_len
        assert row.counted.any()
        assert (row.targets == row.inputs + 1).all()
        for target in row.counted_targets:
            assert target not in seen
            seen[target] = target - row.inputs[0]
    assert sorted(seen) == [at for at in range(1, size) if wanted[at]]
    for at, before in seen.items():
        assert before == context(at, size, seq_len, stride)
        assert before >= min(at, seq_len - stride + 1)


@pytest.mark.parametrize("lengths", [(), ("--seq-len", 50), ("--seq-len", 64, "--stride", 20)], ids=str)
def test_text_is_scored_token_by_token(folder, tmp_path, command, lengths):
    file = write_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    model, tokenizer = tiny_model(), tiny_tokenizer()
    seq_len = lengths[1] if lengths else 256
    stride = lengths[3] if len(lengths) > 2 else seq_len
    ids = [tokenizer.encode(text) for text in TEXTS]
    want = sum(nats(model, each, np.ones(len(each)), seq_len, stride) for each in ids)
    targets = sum(max(len(each) - 1, 0) for each in ids)
    # The first token has nothing before it.
    num_bytes = sum(int(tokenizer.token_bytes[each[1:]].sum()) for each in ids)
    status, out, err = command(folder, file, "--json", tmp_path / "out.json", "--batch-size", 3, *lengths)
    assert status == 0
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert found["nats"] == pytest.approx(want, rel=1e-5)
    assert (found["targets"], found["num_bytes"], found["texts"]) == (targets, num_bytes, 4)
    assert found["perplexity"] == pytest.approx(math.exp(want / targets), rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(want / math.log(2) / num_bytes, rel=1e-5)
    assert (found["model"], found["format"], found["seq_len"], found["stride"]) == (
        str(folder),
        "text",
        seq_len,
        stride,
    )
    assert out.splitlines()[0] == f"perplexity     {found['perplexity']:.4f}"
    assert out.splitlines()[2] == f"bits a byte    {found['bits_per_byte']:.4f}"
    assert f"over           {targets:,} tokens ({num_bytes:,} bytes) of 4 texts, in {found['rows']} rows" in out
    assert err == f"[{folder}]\n2 texts left out: nothing in them to predict\n"


def test_a_model_of_this_package_begins_texts_as_it_learned(tmp_path, command):
    tokenizer = Tokenizer.train([TEXT], kind="bpe", vocab_size=300)
    shape = {**SHAPE, "vocab_size": 300, "init_std": 0.4, "num_kv_heads": 2}
    model = GPT(GPTConfig(**shape), seed=2)
    model.eval()
    file = tmp_path / "a.txt"
    file.write_text("hello größe", encoding="utf-8")
    ids = tokenizer.encode("hello größe")
    for begins_with_end in (False, True):
        folder = tmp_path / str(begins_with_end)
        folder.mkdir()
        save_model(folder, model, tokenizer, texts_begin_with_end=begins_with_end)
        status, _, _ = command(folder, file, "--json", tmp_path / "out.json")
        assert status == 0
        found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
        whole = [tokenizer.end_id, *ids] if begins_with_end else ids
        assert found["nats"] == pytest.approx(nats(model, whole, np.ones(len(whole))), rel=1e-5)
        assert found["targets"] == len(whole) - 1
        assert begins_with_end == (found["num_bytes"] == len("hello größe".encode()))


@pytest.mark.parametrize("seq_len", [256, 20])
def test_of_conversations_the_answers_are_scored(folder, tmp_path, command, seq_len):
    chats = [[{"role": role, "content": content} for role, content in chat] for chat in CHATS]
    file = write_lines(tmp_path / "chats.jsonl", [{"messages": chat} for chat in chats])
    model, tokenizer = tiny_model(), tiny_tokenizer()
    want = targets = 0
    for chat in chats:
        ids, is_target = encode_chat(tokenizer, chat)
        want += nats(model, ids.tolist(), is_target, seq_len, seq_len)
        targets += is_target.sum()
    status, out, err = command(folder, file, "--json", tmp_path / "out.json", "--seq-len", seq_len)
    assert status == 0
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert found["nats"] == pytest.approx(want, rel=1e-5)
    # Said and scored: good day, größe 4!, the model says: 49!, and three ends of turns.
    assert found["num_bytes"] == len("good daygröße 4!the model says: 49!".encode())
    assert found["targets"] == targets
    assert "of 2 examples" in out
    assert err.splitlines()[0] == "format: chat, as the first record has messages"


def test_of_a_prompt_and_its_completion_the_completion_is_scored(folder, tmp_path, command):
    file = write_lines(tmp_path / "a.jsonl", [{"prompt": "user says", "completion": " hello"}])
    status, _, err = command(folder, file, "--json", tmp_path / "out.json")
    assert status == 0
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert (found["format"], found["texts"], found["num_bytes"]) == ("prompt_completion", 1, 6)
    assert err.startswith("format: prompt_completion, as the first record has completion and prompt\n")


def test_a_prompt_may_stand_in_the_chat_template(folder, tmp_path, command):
    file = write_lines(tmp_path / "a.jsonl", [{"prompt": "user says", "completion": "hello"}])
    messages = [{"role": "user", "content": "user says"}, {"role": "assistant", "content": "hello"}]
    ids, is_target = encode_chat(tiny_tokenizer(), messages)
    want = nats(tiny_model(), ids.tolist(), is_target)
    status, _, _ = command(folder, file, "--prompt-as", "chat", "--json", tmp_path / "out.json")
    assert status == 0
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert found["nats"] == pytest.approx(want, rel=1e-5)
    assert (found["prompt_as"], found["num_bytes"]) == ("chat", len("hello"))


RUNS = {
    "prompt_completion": {"prompt_field": "q", "completion_field": "a", "prompt_as": "chat"},
    "chat": {"messages_field": "turns", "train_on": "last"},
}


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("adapter", [{"rank": 2}, None], ids=["adapters", "all"])
def test_a_run_is_measured_as_it_measures_itself(kind, adapter, tmp_path, command):
    """The loss of its last validation, of the run's folder, its final one and its newest checkpoint."""
    words = ["north", "south", "east"]
    turns = [[("user", f"is it {word}?"), ("assistant", "yes!"), ("user", "?"), ("assistant", word)] for word in words]
    chats = [{"turns": [{"role": role, "content": content} for role, content in chat]} for chat in turns]
    prompts = [{"q": f"is it {word}?", "a": f"{word}!"} for word in words]
    examples = chats if kind == "chat" else prompts
    source, file = (write_lines(tmp_path / f"{name}.jsonl", examples) for name in ("train", "valid"))
    data = {"source": str(source), "valid_paths": str(file), "format": kind, **RUNS[kind]}
    mx.disable_compile()
    try:
        run = train(finetune_config(tmp_path, kind, train__steps=2, data=data, adapter=adapter), log=lambda _: None)
    finally:
        mx.enable_compile()
    settings = ", ".join(f"{name}: {value}" for name, value in RUNS[kind].items())
    for model in (run.folder, run.folder / "final", run.folder / "checkpoints" / "step-00000002"):
        status, _, err = command(model, file, "--json", tmp_path / "out.json")
        assert status == 0, err
        found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
        assert found["nats_per_token"] == pytest.approx(run.loss, rel=1e-5)
        assert found["bits_per_byte"] == pytest.approx(run.bits_per_byte, rel=1e-5)
        assert f"format: {kind}, as the first record has " in err
        assert f"as in the run's section data: {settings}\n" in err


def choice_sums(model, tokenizer, record):
    """ln p of each choice, its number of tokens: by the rule of lm-evaluation-harness, token by token."""
    prompt = record.get("question", record.get("prompt"))
    sums = []
    for choice in record["choices"]:
        before = prompt.rstrip()
        text = prompt + ("" if prompt.endswith(" ") or not prompt else " ") + choice
        ids, start = tokenizer.encode(text), len(tokenizer.encode(before))
        if not prompt:
            ids, start = [tokenizer.end_id, *ids], 1
        sums.append((sum(log_p(model, ids[:at], ids[at]) for at in range(start, len(ids))), len(ids) - start))
    return sums


def test_choices_are_scored_token_by_token(folder, tmp_path, command):
    file = write_lines(tmp_path / "q.jsonl", QUESTIONS)
    model, tokenizer = tiny_model(), tiny_tokenizer()
    answers = [0, 1, 1, 1]
    right = {name: [] for name in ("acc", "acc_norm", "acc_bytes", "acc_tokens")}
    for record, answer in zip(QUESTIONS, answers, strict=True):
        sums = choice_sums(model, tokenizer, record)
        question = Question("", record.get("question", record.get("prompt")), record["choices"], answer)
        got = score(model, encode_choices(question, tokenizer, [], 256).rows, 3)
        assert got == pytest.approx([total for total, _ in sums], rel=1e-5)
        lengths = {
            "acc": [1] * len(sums),
            "acc_norm": [len(choice) for choice in record["choices"]],
            "acc_bytes": [len(choice.encode()) for choice in record["choices"]],
            "acc_tokens": [size for _, size in sums],
        }
        for name, length in lengths.items():
            scores = [total / size for (total, _), size in zip(sums, length, strict=True)]
            right[name].append(scores.index(max(scores)) == answer)
    status, out, err = command(folder, file, "--json", tmp_path / "out.json", "--batch-size", 2)
    assert status == 0
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    for name, values in right.items():
        share = np.mean(values)
        assert found[name] == pytest.approx(share)
        assert found[f"{name}_stderr"] == pytest.approx(np.std(values, ddof=1) / 2)
        assert f"{name:<12}{100 * share:6.2f} % +- {50 * np.std(values, ddof=1):.2f}\n" in out
    assert found["questions"] == 4
    assert found["chance"] == pytest.approx((2 / 3 + 1) / 4)
    assert err == f"format: choices, as the first record has choices\n[{folder}]\n"


def test_each_measure_has_its_own_winner(monkeypatch):
    """Sums that make another choice the best by each measure."""
    tokenizer = tiny_tokenizer()
    question = Question("here", "größe", ["x", "hello hello hello", "größegröße", "hello number 1"], 0)
    encoded = encode_choices(question, tokenizer, [], 256)
    sizes = [row.counted.sum() for row in encoded.rows]
    sums = np.array([-9.0, -17.0, -12.0, -40.0])
    monkeypatch.setattr(choices_module, "score", lambda *_: sums)
    best = {}
    for answer in range(4):
        scores = score_choices(None, [question._replace(answer=answer)], [encoded], 1)
        best |= {name: answer for name, correct in scores.correct.items() if correct[0]}
        assert scores.accuracy("acc")[1] is None
    characters, num_bytes = [[len(f(c)) for c in question.choices] for f in (str, str.encode)]
    assert best["acc"] == 0
    assert best["acc_norm"] == np.argmax(sums / characters) == 1
    assert best["acc_bytes"] == np.argmax(sums / num_bytes) == 2
    assert best["acc_tokens"] == np.argmax(sums / sizes)


def test_a_prompt_that_is_too_long_loses_its_beginning_with_a_word(folder, tmp_path, command):
    records = [{"question": TEXT[:200], "choices": ["hello", "größe 4"], "answer": 1}, QUESTIONS[0]]
    file = write_lines(tmp_path / "q.jsonl", records)
    status, _, err = command(folder, file, "--json", tmp_path / "out.json", "--seq-len", 16)
    assert status == 0
    assert "the beginning of 1 prompt was cut off: --seq-len 16 holds no more\n" in err
    tokenizer = tiny_tokenizer()
    question = Question("", TEXT[:200], ["hello", "größe 4"], 1)
    whole, cut = (encode_choices(question, tokenizer, [], seq_len) for seq_len in (256, 16))
    for one, other in zip(whole.rows, cut.rows, strict=True):
        assert len(other.inputs) == 16
        assert (one.inputs[-16:] == other.inputs).all()
        assert (one.counted_targets == other.counted_targets).all()
    write_lines(file, [{"question": "x", "choices": ["hello " * 20, "größe"], "answer": 1}])
    status, out, err = command(folder, file, "--seq-len", 16)
    assert (status, out) == (2, "")
    assert f"[evaluate] {file}:1: a choice must have 1 to 16 tokens, which is --seq-len, but choice 0 has " in err


GOOD = '{"question": "q", "choices": ["a", "b"], "answer": 0}'
MALFORMED = [
    ("{", "each line must be one JSON object"),
    ("[1]", "each line must be a JSON object but got a list"),
    ('{"question": "q", "answer": 0}', "must have 'question' or 'prompt', 'choices' and 'answer' but has 'question', "),
    ('{"choices": ["a", "b"], "answer": 0}', "must have 'question' or 'prompt', 'choices' and 'answer' but has "),
    ('{"question": "q", "prompt": "p", "choices": ["a", "b"], "answer": 0}', "must have 'question' or 'prompt', "),
    ('{"question": 3, "choices": ["a", "b"], "answer": 0}', "'question' must be text but is 3."),
    ('{"question": "q", "choices": "ab", "answer": 0}', "'choices' must be a list of two or more texts but is 'ab'."),
    ('{"question": "q", "choices": ["a"], "answer": 0}', "'choices' must be a list of two or more texts but is ['a']."),
    ('{"question": "q", "choices": ["a", ""], "answer": 0}', "choice 1 must be a text that is not empty but is ''."),
    ('{"question": "q", "choices": ["a", 2], "answer": 0}', "choice 1 must be a text that is not empty but is 2."),
    ('{"question": "q", "choices": ["a", "b", "a"], "answer": 0}', "choices must differ but 0 and 2 are 'a'."),
    (
        '{"question": "q", "choices": ["a", "b"], "answer": 2}',
        "'answer' must be a number 0 ... 1, a letter A ... B",
    ),
    ('{"question": "q", "choices": ["a", "b"], "answer": true}', "the text of a choice but is True."),
    ('{"question": "q", "choices": ["a", "b"], "answer": "C"}', "the text of a choice but is 'C'."),
    ('{"question": "q", "choices": ["a", "b"], "answer": null}', "the text of a choice but is None."),
]


@pytest.mark.parametrize(("line", "message"), MALFORMED, ids=[line for line, _ in MALFORMED])
def test_malformed_questions_are_named(tmp_path, command, line, message):
    """Before the model, which is not there, is looked for."""
    file = tmp_path / "q.jsonl"
    file.write_text(f"{GOOD}\n{line}\n\n{GOOD}\n{line}\n", encoding="utf-8")
    status, out, err = command("no-model", file, "--format", "choices")
    assert (status, out) == (2, "")
    (error,) = err.splitlines()
    assert f"{file}:2: " in error
    assert message in error
    assert error.endswith(f" 1 more is malformed ({file}:5).")


@pytest.mark.parametrize(("answer", "number"), [(1, 1), ("b", 1), ("A", 0), ("B", 1), ("c", 0), ("red", 2)], ids=str)
def test_what_an_answer_means(tmp_path, answer, number):
    """A choice's text comes before a letter."""
    record = {"prompt": "q", "choices": ["c", "x", "red"], "answer": answer}
    file = write_lines(tmp_path / "q.jsonl", [record])
    (question,) = choices_module.read_questions(list_paths([str(file)]).files)
    assert question.answer == number


def test_bad_settings_and_data_are_one_line(folder, tmp_path, command):
    text = tmp_path / "a.txt"
    text.write_text("hello", encoding="utf-8")
    fields = write_lines(tmp_path / "f.jsonl", [{"content": "x"}])
    chats = write_lines(tmp_path / "chats.jsonl", [{"messages": []}])
    questions = write_lines(tmp_path / "q.jsonl", QUESTIONS)
    pairs = write_lines(tmp_path / "p.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    (tmp_path / "one.txt").write_text("x", encoding="utf-8")
    cases = [
        (
            (folder, text, "--seq-len", 257),
            "--seq-len must be in 1 ... 256, which is how much the model reads, but ",
        ),
        ((folder, text, "--seq-len", 0), "--seq-len must be in 1 ... 256, "),
        ((folder, text, "--seq-len", 8, "--stride", 9), "--stride must lie in 1 ... 8, which is --seq-len, but got 9."),
        ((folder, text, "--stride", 0), "--stride must lie in 1 ... 256, "),
        ((folder, text, "--batch-size", 0), "--batch-size must be at least 1 but got 0."),
        ((folder, tmp_path / "none.txt"), "does not exist"),
        (
            (folder, fields),
            f"{fields}:1: a text must be in the field 'text' but the record has 'content'. Name ",
        ),
        ((folder, tmp_path / "empty.jsonl"), "must hold examples but is empty."),
        ((folder, tmp_path / "one.txt"), "the data must hold a token to predict but holds none."),
        ((folder, fields, "--format", "chat"), "'messages'"),
        ((folder, chats, "--prompt-as", "chat"), "--prompt-as holds for prompt_completion but the data are chat."),
        (
            (folder, chats, "--format", "chat", "--text-field", "x"),
            "--text-field holds for text but the data are chat.",
        ),
        (
            (folder, questions, "--stride", 4),
            "--stride holds for text and chat and prompt_completion but the data are choices. Leave it out, or name ",
        ),
        ((folder, pairs), "is a pair of answers. Name one of its fields with --text-field."),
    ]
    for arguments, message in cases:
        status, out, err = command(*arguments)
        assert (status, out) == (2, ""), err
        assert message in err.splitlines()[-1]
        assert err.splitlines()[-1].startswith("error: ")


def test_examples_need_a_tokenizer_of_hugging_face(tmp_path, command):
    tokenizer = Tokenizer.train([TEXT], kind="bpe", vocab_size=300)
    (tmp_path / "own").mkdir()
    save_model(tmp_path / "own", GPT(GPTConfig(vocab_size=300, num_layers=1, hidden_size=16, num_heads=2)), tokenizer)
    file = write_lines(tmp_path / "a.jsonl", [{"messages": []}])
    status, out, err = command(tmp_path / "own", file)
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: [evaluate] --format chat needs a tokenizer of Hugging Face's kind")


def test_weights_that_are_not_finite_are_named(tmp_path, command):
    folder = write_hub_model(tmp_path / "model")
    weights = mx.load(str(folder / "model.safetensors"))
    weights["model.norm.weight"] = weights["model.norm.weight"] * mx.nan
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    file = tmp_path / "a.txt"
    file.write_text("hello größe", encoding="utf-8")
    status, out, err = command(folder, file)
    assert (status, out) == (2, "")
    assert "log-probabilities must be finite but those of 1 of 1 rows are not." in err


@pytest.fixture(scope="module")
def peer(folder):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def peer_log_probs(peer, ids):
    """ln p of each token but the first, in float64."""
    import torch

    with torch.no_grad():
        log_probs = peer(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return log_probs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


@pytest.mark.slow
@pytest.mark.parametrize(("seq_len", "stride"), [(256, 256), (100, 100), (100, 30)])
def test_perplexity_is_transformers(folder, peer, tmp_path, command, seq_len, stride):
    """By sliding windows that are written out here: each scores what those before it have not."""
    ids = tiny_tokenizer().encode(TEXT)
    assert len(ids) > 500
    found, done = [], 0
    while done < len(ids) - 1:
        end = min(max(seq_len, done + stride), len(ids) - 1)
        start = max(0, end - seq_len)
        found.extend(peer_log_probs(peer, ids[start : end + 1])[done - start :])
        done = end
    assert len(found) == len(ids) - 1
    file = tmp_path / "a.txt"
    file.write_text(TEXT, encoding="utf-8")
    lengths = ("--seq-len", seq_len, "--stride", stride)
    assert command(folder, file, "--json", tmp_path / "out.json", *lengths)[0] == 0
    result = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert result["targets"] == len(found)
    assert abs(result["nats"] + sum(found)) / len(found) < 1e-4
    assert result["perplexity"] == pytest.approx(math.exp(-np.mean(found)), rel=1e-4)


@pytest.mark.slow
def test_choice_scores_are_transformers(folder, peer):
    opened = open_model(folder)
    tokenizer = opened.tokenizer
    for record in QUESTIONS:
        prompt = record.get("question", record.get("prompt"))
        question = Question("", prompt, record["choices"], 0)
        got = score(opened.model, encode_choices(question, tokenizer, opened.begin_ids, 256).rows, 2)
        for found, choice in zip(got, record["choices"], strict=True):
            text = f"{prompt.rstrip()} {choice}" if prompt else choice
            ids = tokenizer.encode(text) if prompt else [tokenizer.end_id, *tokenizer.encode(text)]
            start = len(tokenizer.encode(prompt.rstrip())) if prompt else 1
            assert abs(found - peer_log_probs(peer, ids)[start - 1 :].sum()) < 1e-4 * (len(ids) - start)
