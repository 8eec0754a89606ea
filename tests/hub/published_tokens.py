"""Small tokenizers whose files are laid out as those of the published models."""

from collections.abc import Mapping
import json
from typing import Any

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from ways_to_cut import PRE_TOKENIZERS

from tests.data.chat_templates import FAMILIES, byte_level, family_files, sentencepiece_like

Files = dict[str, bytes]


def encoded(content: Any) -> bytes:
    """JSON."""
    return json.dumps(content).encode()


def _with(files: Mapping[str, bytes], settings: Mapping[str, Any], begin: str | None = None) -> Files:
    """The files with further settings, and with a token that begins every text."""
    settings = {**json.loads(files["tokenizer_config.json"]), **settings}
    files = {**files, "tokenizer_config.json": encoded(settings)}
    if begin is not None:
        backend = Tokenizer.from_buffer(files["tokenizer.json"])
        token = (begin, backend.token_to_id(begin))
        template = processors.TemplateProcessing(f"{begin} $A", f"{begin} $A {begin}:1 $B:1", [token])
        steps = [backend.post_processor, template] if backend.post_processor else [template]
        backend.post_processor = processors.Sequence(steps)
        files["tokenizer.json"] = backend.to_str().encode()
    return files


def _cut(files: Mapping[str, bytes], way: str) -> Files:
    """The byte-level files with a published way to cut texts."""
    backend = Tokenizer.from_buffer(files["tokenizer.json"])
    backend.pre_tokenizer = PRE_TOKENIZERS[way]()
    backend.normalizer = normalizers.NFC() if way == "qwen2" else None
    content = json.loads(backend.to_str())
    content["model"]["ignore_merges"] = way == "llama-bpe"
    return {**files, "tokenizer.json": encoded(content)}


def smollm() -> Files:
    """`bos_token` begins a turn and no text."""
    names = {"bos_token": "<|im_start|>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    files = _cut(family_files("chatml"), "smollm")
    files = _with(files, {"tokenizer_class": "GPT2Tokenizer", "vocab_size": 49152, **names})
    return {**files, "special_tokens_map.json": encoded({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})}


def llama_2(**settings: Any) -> Files:
    """Llama's, TinyLlama's and Mistral's."""
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": None}
    more = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "sp_model_kwargs": {}, "add_bos_token": True}
    return _with(sentencepiece_like(["<s>", "</s>"]), {**names, **more, **settings}, "<s>")


def llama_of_2023() -> Files:
    """Its settings say all of a token."""
    token = {"__type": "AddedToken", "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return llama_2(**{role: {**token, "content": text} for role, text in names.items()})


def llama_3() -> Files:
    """Two steps behind a text's ids: the byte-level one, and the token that begins it."""
    return _with(_cut(family_files("llama 3"), "llama-bpe"), {"model_max_length": 131072}, "<|begin_of_text|>")


def nemo() -> Files:
    """Byte-level, with Llama 2's names, and without a template."""
    return byte_level(["<unk>", "<s>", "</s>"], {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})


def qwen(family: str = "chatml") -> Files:
    """Without a token that begins texts."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    names = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None}
    more = {"add_bos_token": False, "errors": "replace", "split_special_tokens": False}
    settings = {**names, **more, "chat_template": FAMILIES[family][0], "tokenizer_class": "Qwen2Tokenizer"}
    files = _with(_cut(byte_level(specials, added=["<think>", "</think>"]), "qwen2"), settings)
    return {**files, "merges.txt": b"", "vocab.json": b"{}"}


def gemma(*, template: bool = True, **settings: Any) -> Files:
    """No space before a text, a template that takes no system message, and `<eos>` does not end a turn."""
    specials = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<image_soft_token>"]
    files = sentencepiece_like(specials)
    backend = Tokenizer.from_buffer(files["tokenizer.json"])
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    files["tokenizer.json"] = backend.to_str().encode()
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    more = {"tokenizer_class": "GemmaTokenizer", **({"chat_template": FAMILIES["gemma"][0]} if template else {})}
    return _with(files, {**names, **more, **settings}, "<bos>")


def gpt2() -> Files:
    """Its settings name no token."""
    return {**byte_level(["<|endoftext|>"]), "tokenizer_config.json": encoded({"model_max_length": 1024})}


def olmoe() -> Files:
    """Of GPT-NeoX."""
    names = {"bos_token": None, "eos_token": "<|endoftext|>", "pad_token": "<|padding|>"}
    return byte_level(["<|padding|>", "<|endoftext|>"], {**names, "tokenizer_class": "GPTNeoXTokenizer"})
