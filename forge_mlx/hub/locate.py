"""Where a model is: a folder or a file here, or the name of one on the Hugging Face hub."""

import os
from pathlib import Path
import re
from typing import Final, Literal, TypeAlias

from forge_mlx.hub.errors import HubError

# OWNER/NAME, or the NAME of one of the first models.
_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
Part: TypeAlias = Literal["all", "tokenizer", "config"]
"""What of a model is needed: everything, all but the weights, or config.json alone."""

_TOKENIZER: Final = ("*.json", "*.jinja", "*.txt", "*.model")
_FILES: Final[dict[Part, tuple[str, ...]]] = {
    "all": ("*.safetensors", *_TOKENIZER),
    "tokenizer": _TOKENIZER,
    "config": ("config.json",),
}
# Mistral's own format of the same weights, and folders of others'.
_LEFT_OUT: Final = ("consolidated*", "*/*")


def locate(model: str | Path, *, revision: str | None = None, part: Part = "all") -> Path:
    """The path of a model, downloaded first where it is the name of one on the hub.

    Only safetensors, JSON, templates, text and SentencePiece models are downloaded, into the cache of huggingface_hub
    (`HF_HOME`), with its progress bar. With `HF_HUB_OFFLINE=1` only what is there already is found.

    Args:
        model: A folder, a file, or an id such as HuggingFaceTB/SmolLM2-135M-Instruct.
        revision: A branch, tag or commit of the hub; None: main.
        part: What of a model of the hub is needed; the rest is downloaded when it is.

    Raises:
        HubError: There is no such thing here and no such model there, or the hub cannot be reached.
    """
    path = Path(model).expanduser()
    try:
        is_here = path.exists()
    except OSError as error:
        raise HubError(f"{str(model)[:80]}: there is no such file or folder: {error.strerror or error}.") from None
    if is_here:
        if revision is not None:
            raise HubError(f"{path}: a revision must be left out for what is here but got {revision!r}.")
        return path
    name = str(model)
    if _is_path(model):
        raise HubError(f"{name}: there is no such file or folder, and it is no OWNER/NAME of a model on the hub.")
    return _downloaded(name, revision, _FILES[part])


def _is_path(model: str | Path) -> bool:
    if isinstance(model, Path) and (model.is_absolute() or len(model.parts) != 2):
        return True
    return _ID.fullmatch(str(model)) is None or str(model).endswith((".gguf", ".safetensors", ".json"))


def _downloaded(name: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    # Takes half a second, which a folder here need not wait for.
    import huggingface_hub
    from huggingface_hub import errors

    start = f"{name}: there is no such folder here, and"
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(_LEFT_OUT)
            )
        )
    except errors.GatedRepoError:
        raise HubError(
            f"{start} on the hub its owner must admit you first: ask at https://huggingface.co/{name}, then log in "
            "with `hf auth login`."
        ) from None
    except errors.RepositoryNotFoundError:
        raise HubError(f"{start} the hub has no model of this name that you may read. Check it, or log in.") from None
    except errors.RevisionNotFoundError:
        raise HubError(f"{start} on the hub it has no revision {revision!r}.") from None
    except errors.LocalEntryNotFoundError:
        offline = os.environ.get("HF_HUB_OFFLINE")
        reason = f"HF_HUB_OFFLINE is {offline}" if offline else "the hub cannot be reached"
        raise HubError(f"{start} it is not in the cache of the hub while {reason}.") from None
    except (errors.HFValidationError, OSError, RuntimeError) as error:
        said = " ".join(str(error).split())
        raise HubError(f"{start} the hub could not give it: {said[:300].rstrip('. ')}.") from None
