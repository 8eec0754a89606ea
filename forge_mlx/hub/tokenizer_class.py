"""A tokenizer's files as other readers need them: a class that reads tokenizer.json as it is, and the chat template."""

from collections.abc import Callable, Mapping
import json
from typing import Any, Final

from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.data.tokenizer_settings import TEMPLATE_FILE

_FILE: Final = "tokenizer_config.json"
_PROCESSORS: Final = "chat_template.json"
_REBUILT: Final = "LlamaTokenizer"
_AS_IT_IS: Final = "PreTrainedTokenizerFast"


def readable_as_it_is(files: Mapping[str, Any], log: Callable[[str], None]) -> dict[str, Any]:
    """The tokenizer's files, with another class where transformers 5 would cut texts otherwise than tokenizer.json.

    Older SentencePiece tokenizers, such as TinyLlama's, put a space before a text and behind each special token by a
    normaliser. transformers 5, and mlx-lm with it, builds a `LlamaTokenizer` from the vocabulary alone: there a space
    stands only before the text, unless `legacy` is set.

    Args:
        files: Bytes, or what becomes JSON, by the file's name.
        log: Told in one line of another class.
    """
    content = files.get(_FILE)
    if not isinstance(content, bytes) or not isinstance(files["tokenizer.json"], bytes):
        return dict(files)
    settings = json.loads(content)
    name = str(settings.get("tokenizer_class"))
    if name.removesuffix("Fast") != _REBUILT or settings.get("legacy"):
        return dict(files)
    if json.loads(files["tokenizer.json"]).get("normalizer") is None:
        return dict(files)
    log(
        f"{_FILE}: tokenizer_class is {_AS_IT_IS} instead of {name}, which in transformers 5 cuts texts behind special "
        "tokens otherwise than tokenizer.json"
    )
    return {**files, _FILE: {**settings, "tokenizer_class": _AS_IT_IS}}


def with_own_template(tokenizer: HubTokenizer, files: Mapping[str, Any], log: Callable[[str], None]) -> dict[str, Any]:
    """The tokenizer's files, with the chat template where tokenizers look for it.

    transformers' tokenizers, and mlx-lm with them, do not read `chat_template.json`, which is a processor's.

    Args:
        tokenizer: What the files are of.
        files: Bytes, or what becomes JSON, by the file's name.
        log: Told in one line of another file.
    """
    settings = files.get(_FILE, b"{}")
    said = json.loads(settings) if isinstance(settings, bytes) else settings
    if tokenizer.chat_template is None or TEMPLATE_FILE in files or said.get("chat_template") is not None:
        return dict(files)
    log(f"{TEMPLATE_FILE}: holds the chat template too, as other readers of a tokenizer do not look for {_PROCESSORS}")
    return {**files, TEMPLATE_FILE: tokenizer.chat_template.encode()}
