"""Which tokens count: by hand for each family of templates, and as in transformers where the template has tags."""

import json
import random

from chat_templates import FAMILIES, TAGGED, byte_level, family_files, sentencepiece_like
from forge_mlx.data.chat import encode_chat, encode_prompt_completion, encode_text, render_prompt
from forge_mlx.data.hub_tokenizer import HubTokenizer
import numpy as np
import pytest

transformers = pytest.importorskip("transformers", reason="it comes with mlx-lm, which needs Python 3.11")

USER = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": "yes é"}
TWO_TURNS = [USER, ANSWER, {"role": "user", "content": "a"}, {"role": "assistant", "content": " a\nyes "}]
# Tokens of TWO_TURNS; those that count are in brackets.
BY_HAND = {
    "chatml": "<|im_start|> system Ċ Y o u Ġa r e Ġa Ġ h e l p f u l Ġ assistant <|im_end|> Ċ "
    "<|im_start|> user Ċ Hello <|im_end|> Ċ <|im_start|> assistant Ċ [yes] [Ġ] [Ã] [©] [<|im_end|>] Ċ "
    "<|im_start|> user Ċ a <|im_end|> Ċ <|im_start|> assistant Ċ [Ġa] [Ċ] [yes] [Ġ] [<|im_end|>] Ċ",
    "llama 3": "<|begin_of_text|> <|start_header_id|> system <|end_header_id|> Ċ Ċ C u t t i n g Ġ K n o w l e d g e "
    "Ġ D a t e : Ġ D e c e m b e r Ġ 2 0 2 3 ĊĊ <|eot_id|> "
    "<|start_header_id|> user <|end_header_id|> Ċ Ċ Hello <|eot_id|> "
    "<|start_header_id|> assistant <|end_header_id|> Ċ Ċ [yes] [Ġ] [Ã] [©] [<|eot_id|>] "
    "<|start_header_id|> user <|end_header_id|> Ċ Ċ a <|eot_id|> "
    "<|start_header_id|> assistant <|end_header_id|> Ċ Ċ [a] [Ċ] [yes] [<|eot_id|>]",
    "llama 2": "<s> ▁ [ INST ] ▁ Hello ▁ [ / INST ] [▁] [yes] [▁] [<0xC3>] [<0xA9>] [▁] [</s>] "
    "<s> ▁ [ INST ] ▁a ▁ [ / INST ] [▁a] [<0x0A>] [yes] [▁] [</s>]",
    "mistral": "<s> ▁ [ INST ] ▁ Hello ▁ [ / INST ] [yes] [▁] [<0xC3>] [<0xA9>] [</s>] "
    "▁ [ INST ] ▁a ▁ [ / INST ] [▁a] [<0x0A>] [yes] [▁] [</s>]",
    "gemma": "<bos> <start_of_turn> user Ċ Hello <end_of_turn> Ċ "
    "<start_of_turn> model Ċ [yes] [Ġ] [Ã] [©] [<end_of_turn>] Ċ "
    "<start_of_turn> user Ċ a <end_of_turn> Ċ <start_of_turn> model Ċ [a] [Ċ] [yes] [<end_of_turn>] Ċ",
    "zephyr": "▁ < | user | > <0x0A> Hello </s> ▁ <0x0A> < | assistant | > <0x0A> [yes] [▁] [<0xC3>] [<0xA9>] [</s>] "
    "▁ <0x0A> < | user | > <0x0A> a </s> ▁ <0x0A> < | assistant | > <0x0A> [▁a] [<0x0A>] [yes] [▁] [</s>] ▁ <0x0A>",
    # The last turn alone begins with its reasoning, though it is empty.
    "qwen 3": "<|im_start|> user Ċ Hello <|im_end|> Ċ <|im_start|> assistant Ċ [yes] [Ġ] [Ã] [©] [<|im_end|>] Ċ "
    "<|im_start|> user Ċ a <|im_end|> Ċ "
    "<|im_start|> assistant Ċ [<think>] [ĊĊ] [</think>] [ĊĊ] [Ġa] [Ċ] [yes] [Ġ] [<|im_end|>] Ċ",
    "tagged": "<|im_start|> user Ċ Hello <|im_end|> Ċ <|im_start|> assistant Ċ [yes] [Ġ] [Ã] [©] [<|im_end|>] Ċ "
    "<|im_start|> user Ċ a <|im_end|> Ċ <|im_start|> assistant Ċ [Ġa] [Ċ] [yes] [Ġ] [<|im_end|>] Ċ",
    "r1": "<s> <|User|> Hello <|Assistant|> [yes] [Ġ] [Ã] [©] [</s>] "
    "<|User|> a <|Assistant|> [Ġa] [Ċ] [yes] [Ġ] [</s>]",
    "no prompt": "< | user | > Ċ Hello </s> Ċ < | assistant | > Ċ [yes] [Ġ] [Ã] [©] [</s>] Ċ "
    "< | user | > Ċ a </s> Ċ < | assistant | > Ċ [Ġa] [Ċ] [yes] [Ġ] [</s>] Ċ",
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def tokenizer(family):
    return HubTokenizer(family_files(family), family)


@pytest.fixture(scope="module")
def theirs(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("t")
    tokenizer.save(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def of_family(family):
    return HubTokenizer(family_files(family), family)


def with_template(template, specials=("<s>", "</s>", "<|im_end|>"), make=byte_level):
    return HubTokenizer(make(specials, {"eos_token": "</s>", "chat_template": template}), "t")


def names_of(tokenizer, ids):
    vocab = json.loads(tokenizer.files["tokenizer.json"])
    names = {token: text for text, token in vocab["model"]["vocab"].items()}
    names |= {entry["id"]: entry["content"] for entry in vocab["added_tokens"]}
    return [names[token] for token in ids.tolist()]


def bracketed(tokenizer, encoded):
    names = names_of(tokenizer, encoded.ids)
    return " ".join(f"[{name}]" if counts else name for name, counts in zip(names, encoded.is_target, strict=True))


def spelt(tokenizer, ids):
    """The text of tokens, special ones by their names."""
    texts = zip(ids.tolist(), names_of(tokenizer, ids), strict=True)
    special = tokenizer.special_ids
    return b"".join(
        name.encode() if token in special else tokenizer.token_to_bytes(token) for token, name in texts
    ).decode()


def target_texts(tokenizer, encoded):
    """The text of each run of tokens that count."""
    borders = np.flatnonzero(np.diff(encoded.is_target, prepend=False, append=False)).reshape(-1, 2)
    return [spelt(tokenizer, encoded.ids[start:end]) for start, end in borders]


def test_targets_by_hand(tokenizer, family):
    encoded = encode_chat(tokenizer, TWO_TURNS)
    assert bracketed(tokenizer, encoded) == BY_HAND[family]
    assert (encoded.ids.dtype, encoded.is_target.dtype) == (np.int32, np.bool_)


def test_last_turn_and_all_tokens(tokenizer):
    encoded = encode_chat(tokenizer, TWO_TURNS)
    last = encode_chat(tokenizer, TWO_TURNS, train_on="last")
    assert last.ids.tolist() == encoded.ids.tolist()
    assert target_texts(tokenizer, last) == target_texts(tokenizer, encoded)[-1:]
    everything = encode_chat(tokenizer, TWO_TURNS[:3], train_on="all")
    assert everything.is_target.tolist() == [False] + [True] * (len(everything.ids) - 1)


def random_conversation(rng):
    words = ["yes", "a", " ", "\n", "é", "🙂", "\u2028", "Hello", "?"]
    texts = ["".join(rng.choices(words, k=rng.randrange(8))) for _ in range(2 * rng.randrange(1, 4))]
    # A newline there would make one token with the header's.
    contents = [text.lstrip("\n") if at % 2 else text for at, text in enumerate(texts)]
    return [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]


EXPECTED = {
    "chatml": lambda content, _: f"{content}<|im_end|>",
    "llama 3": lambda content, _: f"{content.strip()}<|eot_id|>",
    "llama 2": lambda content, _: f" {content.strip()} </s>",
    "mistral": lambda content, _: f"{content}</s>",
    "gemma": lambda content, _: f"{content.strip()}<end_of_turn>",
    "zephyr": lambda content, _: f"{content}</s>",
    "qwen 3": lambda content, last: (
        f"<think>\n\n</think>\n\n{content.lstrip(chr(10))}<|im_end|>" if last else f"{content}<|im_end|>"
    ),
    "tagged": lambda content, _: f"{content}<|im_end|>",
    "r1": lambda content, _: f"{content}</s>",
    "no prompt": lambda content, _: f"{content}</s>",
}


def test_targets_are_the_answers_with_their_ends(tokenizer, theirs, family):
    rng = random.Random(3)
    for _ in range(40):
        messages = random_conversation(rng)
        encoded = encode_chat(tokenizer, messages)
        contents = [message["content"] for message in messages[1::2]]
        expected = [EXPECTED[family](content, at == len(contents) - 1) for at, content in enumerate(contents)]
        assert target_texts(tokenizer, encoded) == expected
        assert encoded.ids.tolist() == theirs.apply_chat_template(messages)["input_ids"]
        prompt = render_prompt(tokenizer, messages[:-1])
        assert prompt == theirs.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
        # What is learnt last begins where the model will be made to speak.
        if family not in ("r1", "no prompt"):
            first = encode_chat(tokenizer, messages, train_on="last").is_target.argmax()
            assert spelt(tokenizer, encoded.ids[:first]) == spelt(tokenizer, np.array(prompt))


def test_generation_tags_as_in_transformers():
    rng = random.Random(5)
    for files in (byte_level, sentencepiece_like):
        specials = ["<|im_start|>", "<|im_end|>"]
        ours = HubTokenizer(files(specials, {"eos_token": "<|im_end|>", "chat_template": TAGGED}), "t")
        theirs = transformers.PreTrainedTokenizerFast(
            tokenizer_object=transformers.tokenization_utils_tokenizers.TokenizerFast.from_buffer(
                ours.files["tokenizer.json"]
            ),
            eos_token="<|im_end|>",
            chat_template=TAGGED,
        )
        for _ in range(40):
            messages = random_conversation(rng)
            expected = theirs.apply_chat_template(messages, return_assistant_tokens_mask=True)
            encoded = encode_chat(ours, messages)
            assert encoded.ids.tolist() == expected["input_ids"]
            assert encoded.is_target.tolist() == [bool(value) for value in expected["assistant_masks"]]
            assert target_texts(ours, encode_chat(ours, messages, train_on="last")) == target_texts(ours, encoded)[-1:]


CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
TOOL_TURNS = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": '{"a": 1}'},
    {"role": "assistant", "content": "yes", "reasoning_content": "so"},
    USER,
    ANSWER,
]


def test_tool_calls_are_targets():
    tokenizer = of_family("qwen 3")
    assert target_texts(tokenizer, encode_chat(tokenizer, TOOL_TURNS[:4])) == [
        '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call><|im_end|>',
        "<think>\nso\n</think>\n\nyes<|im_end|>",
    ]
    # The reasoning of the past is left out, by this template.
    assert target_texts(tokenizer, encode_chat(tokenizer, TOOL_TURNS)) == [
        '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call><|im_end|>',
        "yes<|im_end|>",
        "<think>\n\n</think>\n\nyes é<|im_end|>",
    ]
    tokenizer = of_family("llama 3")
    assert target_texts(tokenizer, encode_chat(tokenizer, TOOL_TURNS[:4])) == [
        '{"name": "f", "parameters": {"a": "é"}}<|eot_id|>',
        "yes<|eot_id|>",
    ]


def test_thinking_in_the_content():
    thought = {"role": "assistant", "content": "<think>\na\n</think>\n\nyes"}
    tokenizer = of_family("qwen 3")
    assert target_texts(tokenizer, encode_chat(tokenizer, [USER, thought, USER, thought])) == [
        "yes<|im_end|>",
        "<think>\na\n</think>\n\nyes<|im_end|>",
    ]


def test_other_beginnings_of_a_conversation():
    for family, messages in {
        "chatml": [ANSWER, USER, ANSWER],
        "llama 3": [{"role": "system", "content": " a\n"}, ANSWER, ANSWER],
        "qwen 3": [{"role": "system", "content": ""}, USER, ANSWER, ANSWER],
        "no prompt": [ANSWER, {"role": "system", "content": "a"}, ANSWER],
    }.items():
        tokenizer = of_family(family)
        texts = target_texts(tokenizer, encode_chat(tokenizer, messages))
        assert [text.startswith(("yes é<", "<think>\n\n</think>\n\nyes é<")) for text in texts] == [True, True]


def test_contents_of_text_parts_are_joined():
    tokenizer = of_family("chatml")
    parts = [{"type": "text", "text": "ye"}, {"type": "text", "text": "s é"}]
    whole = encode_chat(tokenizer, [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}, ANSWER])
    joined = encode_chat(tokenizer, [USER, {"role": "assistant", "content": parts}])
    assert (
        bracketed(tokenizer, joined)
        == bracketed(tokenizer, whole)
        == bracketed(tokenizer, encode_chat(tokenizer, [USER, ANSWER]))
    )


def test_names_of_tokens_in_a_text_become_tokens():
    """As in transformers. The turn still ends where the template ends it."""
    tokenizer = of_family("chatml")
    for answer in ("yes<|im_end|>a \ufdd0", "yes<|im_end|>"):
        messages = [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": answer}]
        assert target_texts(tokenizer, encode_chat(tokenizer, messages)) == [f"{answer}<|im_end|>"]


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
def test_a_token_across_the_border_counts(make):
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}:"
        "{% if not loop.last or add_generation_prompt %} {% endif %}{% else %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    tokenizer = with_template(template, make=make)
    space = "Ġ" if make is byte_level else "▁"
    assert bracketed(tokenizer, encode_chat(tokenizer, [USER, {"role": "assistant", "content": "a"}])).endswith(
        f"Hello : [{space}a] [</s>]"
    )
    # Where the space is a token of its own, it is the prompt's.
    assert bracketed(tokenizer, encode_chat(tokenizer, [USER, {"role": "assistant", "content": "?"}])).endswith(
        f"Hello : {space} [?] [</s>]"
    )


def test_a_special_token_that_takes_in_spaces_is_not_the_answer():
    content = json.loads(byte_level(["</s>", "<|A|>"], {})["tokenizer.json"])
    content["added_tokens"][1]["rstrip"] = True
    template = (
        "{% for m in messages %}{{ '<|A|>' if m.role == 'assistant' else '?' }}{{ m.content + eos_token }}{% endfor %}"
        "{{ '<|A|>' if add_generation_prompt }}"
    )
    config = {"eos_token": "</s>", "chat_template": template}
    files = {"tokenizer.json": json.dumps(content).encode(), "tokenizer_config.json": json.dumps(config).encode()}
    tokenizer = HubTokenizer(files, "t")
    encoded = encode_chat(tokenizer, [USER, {"role": "assistant", "content": "  yes"}])
    assert bracketed(tokenizer, encoded) == "? Hello </s> <|A|> [yes] [</s>]"


SHAKY = {
    "no end": (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}",
        r"messages\[1\] .*: no special token ends it, so that the model would not learn to stop\. Put \{% gen",
    ),
    "an end for the last turn alone": (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{{ eos_token }}",
        r"messages\[1\] .*: no special token ends it",
    ),
    "another text": (
        "{% for m in messages %}{{ m.role + m.content|length|string + eos_token }}{% endfor %}{{ messages|length }}"
        "{{ 'user' if add_generation_prompt }}",
        r"messages\[1\] .*: (the text before it|neither its content nor its end)",
    ),
    "empty tags": (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% generation %}{% endgeneration %}",
        r"the generation tags .* must stand around each of 2 assistant messages but stand around 1\. Repair",
    ),
    "tags that see themselves": (
        "{% set x %}{% generation %}a{% endgeneration %}{% endset %}{% for m in messages %}{{ m.content }}{% endfor %}"
        "{{ x|length }}",
        r"the generation tags .* must stand around each of 2 assistant messages but change its text",
    ),
    "a dropped message": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + eos_token }}{% endif %}{% endfor %}",
        r"messages\[0\] must be in what the chat template writes but it leaves out the content of the role 'user'",
    ),
}


@pytest.mark.parametrize(("template", "message"), SHAKY.values(), ids=SHAKY)
def test_what_is_not_certain_is_an_error(template, message):
    tokenizer = with_template(template)
    with pytest.raises(ValueError, match=message) as caught:
        encode_chat(tokenizer, TWO_TURNS)
    assert str(caught.value).startswith("[chat] ")
    assert "\n" not in str(caught.value)


def test_one_turn_whose_end_comes_last():
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    tokenizer = with_template(template + "{{ 'assistant: ' if add_generation_prompt else eos_token }}")
    assert target_texts(tokenizer, encode_chat(tokenizer, [USER, ANSWER])) == ["yes é\n</s>"]


def test_a_prompt_that_no_turn_begins_with():
    tokenizer = of_family("r1")
    for told in ({"content": "<think>\na</think>yes"}, {"content": "yes", "reasoning_content": "a"}):
        with pytest.raises(
            ValueError, match=r"messages\[1\] .*: the text before it is not what makes the assistant speak"
        ):
            encode_chat(tokenizer, [USER, {"role": "assistant", **told}])


MALFORMED = {
    "no list": ("Hello", r'messages must be a list of at least one message but got "Hello"\.'),
    "nothing": ([], r"messages must be a list of at least one message but got \[\]\."),
    "a text": ([USER, "yes"], r'messages\[1\] must be an object with role and content but got "yes"\.'),
    "no role": (
        [{"content": "a"}],
        r"messages\[0\]\.role must be one that the chat template knows, .*, but is missing\.",
    ),
    "unknown role": ([USER, {"role": "gpt", "content": "a"}], r'messages\[1\]\.role must be one .* but got "gpt"\.'),
    "role of another type": ([{"role": 1, "content": "a"}], r"messages\[0\]\.role must be .* but got 1\."),
    "no content": ([{"role": "user"}, ANSWER], r"messages\[0\]\.content must be a text but is missing\."),
    "no content of the assistant": (
        [USER, {"role": "assistant", "content": None}],
        r"messages\[1\]\.content .* is missing",
    ),
    "a number": ([{"role": "user", "content": 5}], r"messages\[0\]\.content must be a text or a list .* but got 5\."),
    "an image": (
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "url": "b"}]}, ANSWER],
        r'messages\[0\]\.content\[1\] must be a text part, .* but got \{"type": "image", .*\}\. Only text',
    ),
    "a part of another type with a text": (
        [{"role": "user", "content": [{"type": "refusal", "text": "a"}]}, ANSWER],
        r"messages\[0\]\.content\[0\] must be a text part",
    ),
    "a part that is a text": ([{"role": "user", "content": ["a"]}], r"messages\[0\]\.content\[0\] must be a text part"),
    "calls that are none": (
        [USER, {"role": "assistant", "tool_calls": "f()"}],
        r'messages\[1\]\.tool_calls must be a list of calls but got "f\(\)"\.',
    ),
    "a call without a name": (
        [USER, {"role": "assistant", "tool_calls": [CALL, {"function": {}}]}],
        r'messages\[1\]\.tool_calls\[1\] must be \{"function": .* but got \{"function": \{\}\}\.',
    ),
    "no assistant": (
        [USER, USER],
        r"messages must have one by the assistant, which is what is learnt, but got only user\.",
    ),
    "a question at the end": (
        [USER, ANSWER, USER],
        r"messages\[2\], the last one, must be by the assistant but got the role 'user'",
    ),
}


@pytest.mark.parametrize(("messages", "message"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_messages_are_named(messages, message):
    with pytest.raises(ValueError, match=message) as caught:
        encode_chat(of_family("qwen 3"), messages)
    assert str(caught.value).startswith("[chat] ")
    assert "\n" not in str(caught.value)


def test_refusals_of_templates_and_tokenizers():
    with pytest.raises(ValueError, match=r"cannot render the conversation in line 1: System role not supported\."):
        encode_chat(of_family("gemma"), [{"role": "system", "content": "a"}, USER, ANSWER])
    with pytest.raises(ValueError, match=r"leaves out the content of the role 'tool'"):
        encode_chat(of_family("zephyr"), [USER, {"role": "tool", "content": "Hello?"}, ANSWER])
    with pytest.raises(
        ValueError, match=r"must have a chat template but here has none\. Set chat_template to .* chatml"
    ):
        encode_chat(HubTokenizer(byte_level(["</s>"], {"eos_token": "</s>"}), "here"), [USER, ANSWER])
    with pytest.raises(
        ValueError, match=r"messages\[1\], the last one, must leave the assistant to speak but is its own"
    ):
        render_prompt(of_family("chatml"), [USER, ANSWER])


def with_beginning(make):
    files = make(["<s>", "</s>"], {"bos_token": "<s>", "eos_token": "</s>"})
    content = json.loads(files["tokenizer.json"])
    bos = next(entry["id"] for entry in content["added_tokens"] if entry["content"] == "<s>")
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [bos], "tokens": ["<s>"]}},
    }
    return HubTokenizer({**files, "tokenizer.json": json.dumps(content).encode()}, "t")


def test_prompt_and_completion():
    tokenizer = with_beginning(byte_level)

    def shown(*args, **kwargs):
        return bracketed(tokenizer, encode_prompt_completion(tokenizer, *args, **kwargs))

    assert shown("Hello", " yes\n") == "<s> Hello [Ġ] [yes] [Ċ] [</s>]"
    assert shown("Hello ", "a") == "<s> Hello [Ġa] [</s>]"
    assert shown("Hello", "") == "<s> Hello [</s>]"
    assert shown("", "a</s>") == "<s> [a] [<] [/] [s] [>] [</s>]"
    assert shown("é", "🙂", train_on_prompt=True) == "<s> [Ã] [©] [ð] [Ł] [ĻĤ] [</s>]".replace("ĻĤ", "Ļ] [Ĥ")
    assert shown("é", "🙂") == "<s> Ã © [ð] [Ł] [Ļ] [Ĥ] [</s>]"
    assert bracketed(tokenizer, encode_text(tokenizer, "Hello a")) == "<s> [Hello] [Ġa] [</s>]"
    like = with_beginning(sentencepiece_like)
    assert bracketed(like, encode_prompt_completion(like, "Hello", " a")) == "<s> ▁ Hello [▁a] [</s>]"
    assert bracketed(like, encode_text(like, "a é")) == "<s> [▁a] [▁] [<0xC3>] [<0xA9>] [</s>]"


def test_a_first_token_without_one_before_it_does_not_count():
    tokenizer = of_family("chatml")
    assert bracketed(tokenizer, encode_text(tokenizer, "yes a")) == "yes [Ġa] [<|im_end|>]"
