"""Chat templates that do what those of well-known model families do, and tokenizers to go with them."""

from collections.abc import Sequence
import json

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

CHATML = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful assistant<|im_end|>
' }}{% endif %}{{ '<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

LLAMA_3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set rest = messages %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{{- 'Cutting Knowledge Date: December 2023\n\n' + system + '<|eot_id|>' }}
{%- for message in rest %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (message.content | tojson) + '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

LLAMA_2 = """\
{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}{% set system = messages[0]['content'] %}\
{% else %}{% set turns = messages %}{% set system = false %}{% endif %}\
{% for message in turns %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if loop.index0 == 0 and system != false %}\
{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}\
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}\
{% endfor %}"""

MISTRAL = """\
{{ bos_token }}{% for message in messages %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}\
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""

GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"""

ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

QWEN_3 = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" %}
        {%- set ns.searching = false %}
        {%- set ns.query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{% set content = message.content %}{% else %}{% set content = '' %}{% endif %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- if loop.index0 > ns.query and (loop.last or reasoning) %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\n' }}{%- endif %}
            {%- set function = call.function if call.function else call %}
            {{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""

TAGGED = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}\
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}\
{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Its generation prompt is not how the turns of the past begin.
R1 = """\
{{ bos_token }}{% for message in messages %}\
{% if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}\
{% else %}{{ '<|Assistant|>' + message['content'].split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"""

# Nothing asks for the header of the assistant.
NO_PROMPT = """\
{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + eos_token + '\n' }}{% endfor %}"""

FAMILIES = {
    "chatml": (CHATML, ["<|im_start|>", "<|im_end|>"], {"eos_token": "<|im_end|>"}),
    "llama 3": (
        LLAMA_3,
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    ),
    "llama 2": (LLAMA_2, ["<s>", "</s>"], {"bos_token": "<s>", "eos_token": "</s>"}),
    "mistral": (MISTRAL, ["<s>", "</s>"], {"bos_token": "<s>", "eos_token": "</s>"}),
    "gemma": (
        GEMMA,
        ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
        {"bos_token": "<bos>", "eos_token": "<eos>"},
    ),
    "zephyr": (ZEPHYR, ["<s>", "</s>"], {"bos_token": "<s>", "eos_token": "</s>"}),
    "qwen 3": (QWEN_3, ["<|im_start|>", "<|im_end|>"], {"eos_token": "<|im_end|>"}),
    "tagged": (TAGGED, ["<|im_start|>", "<|im_end|>"], {"eos_token": "<|im_end|>"}),
    "r1": (R1, ["<s>", "</s>", "<|User|>", "<|Assistant|>"], {"bos_token": "<s>", "eos_token": "</s>"}),
    "no prompt": (NO_PROMPT, ["</s>"], {"eos_token": "</s>"}),
}

_WORDS = ["user", "assistant", "system", "model", "yes", "Hello", "ĠHello", "Ġyes", "Ġa", "ĊĊ", "INST"]
_ASCII = [chr(code) for code in range(0x21, 0x7F)]


def byte_level(specials: Sequence[str], config: dict | None = None, added: Sequence[str] = ()) -> dict[str, bytes]:
    """A small byte-level BPE tokenizer as GPT-2, Llama 3 and Qwen have it."""
    merges = _merges(_WORDS)
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in merges]
    backend = Tokenizer(models.BPE({piece: token for token, piece in enumerate(pieces)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    backend.add_special_tokens(list(specials))
    backend.add_tokens(list(added))
    return tokenizer_files(backend, config)


def sentencepiece_like(specials: Sequence[str], config: dict | None = None) -> dict[str, bytes]:
    """A small BPE tokenizer with U+2581 for spaces, one put before a text, and with bytes, as Llama 2 has it."""
    merges = _merges([word.replace("Ġ", "▁") for word in _WORDS if "Ċ" not in word])
    pieces = ["<unk>", *specials, *(f"<0x{value:02X}>" for value in range(256)), *_ASCII, "▁"]
    vocab = {piece: token for token, piece in enumerate([*pieces, *("".join(pair) for pair in merges)])}
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", *specials])
    return tokenizer_files(backend, config)


def tokenizer_files(backend: Tokenizer, config: dict | None = None) -> dict[str, bytes]:
    """What a folder with this tokenizer holds."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **(config or {})}
    return {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


def family_files(family: str) -> dict[str, bytes]:
    """The files of a tokenizer with a family's chat template."""
    template, specials, names = FAMILIES[family]
    config = {**names, "chat_template": template}
    if family in ("llama 2", "mistral", "zephyr"):
        return sentencepiece_like(specials, config)
    return byte_level(specials, config, added=["<think>", "</think>", "<tool_call>", "</tool_call>"])


def _merges(words: Sequence[str]) -> list[tuple[str, str]]:
    """Merges that build each word from its left end."""
    return list(dict.fromkeys((word[:at], word[at]) for word in words for at in range(1, len(word))))
