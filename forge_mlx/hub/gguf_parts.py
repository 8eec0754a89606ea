"""GGUF files that llama.cpp has split into parts, read as one."""

from pathlib import Path
from typing import Final

from forge_mlx.hub.errors import HubError
from forge_mlx.hub.gguf_file import GGUFFile, GGUFTensor, read_gguf

_COUNT: Final = "split.count"
_NUMBER: Final = "split.no"
_TENSORS: Final = "split.tensors.count"
_AGAIN: Final = "Are the parts of one model? Download them again."
_MERGE: Final = "llama-gguf-split --merge makes one file of all parts"


def read_whole(path: Path) -> GGUFFile:
    """The header of a GGUF file, with the tensors of all parts where it is the first of several.

    Args:
        path: The file; of a split one the first, NAME-00001-of-0000N.gguf, whose folder holds the others.

    Raises:
        HubError: A part is no GGUF file, is missing or not what its name says, or the parts do not make a whole.
        OSError: One cannot be read.
    """
    first = read_gguf(path)
    others = part_files(first)[1:]
    if not others:
        return first
    tensors = dict(first.tensors)
    for index, file in enumerate(others, 1):
        for name, tensor in _tensors_of(file, index, len(others) + 1).items():
            if name in tensors:
                raise HubError(f"{file}: {name} must be in one part but is in {tensors[name].file.name} too. {_AGAIN}")
            tensors[name] = tensor
    if len(tensors) != (total := _number(first, _TENSORS)):
        raise HubError(f"{path}: {_TENSORS} must be that of the parts, {len(tensors)}, but got {total}. {_AGAIN}")
    return first._replace(tensors=tensors)


def part_files(first: GGUFFile) -> list[Path]:
    """The files that a GGUF file consists of, itself first; each is there.

    Args:
        first: Its header; of a split one that of the first part.

    Raises:
        HubError: It is another part, has another name than llama.cpp's, or one of the others is missing.
    """
    path = first.path
    # What was merged has a count of 0.
    if _COUNT not in first.metadata or (parts := _number(first, _COUNT)) <= 1:
        return [path]
    index = _number(first, _NUMBER)
    ending = _ending(index, parts)
    if not path.name.endswith(ending):
        raise HubError(
            f"{path}: {_COUNT} is {parts}, so that the name must end in {ending} for the other parts to be found. "
            f"Name it so; {_MERGE}."
        )
    start = path.name.removesuffix(ending)
    if index:
        raise HubError(
            f"{path}: of {parts} parts ({_COUNT}) the first must be opened but this is number {index + 1}. Open "
            f"{start}{_ending(0, parts)}."
        )
    files = [path, *(path.with_name(start + _ending(number, parts)) for number in range(1, parts))]
    if missing := [file.name for file in files if not file.is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise HubError(
            f"{path}: all {parts} parts ({_COUNT}) must lie in one folder but {missing[0]}{more} is missing. Download "
            f"what is missing; {_MERGE}."
        )
    return files


def _tensors_of(file: Path, index: int, parts: int) -> dict[str, GGUFTensor]:
    part = read_gguf(file)
    for key, wanted in ((_NUMBER, index), (_COUNT, parts)):
        if (found := _number(part, key)) != wanted:
            raise HubError(f"{file}: {key} must be {wanted}, as the name says, but got {found}. {_AGAIN}")
    return dict(part.tensors)


def _number(file: GGUFFile, key: str) -> int:
    value = file.metadata.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise HubError(f"{file.path}: {key} must be a whole number, as in each part, but got {value!r}. {_AGAIN}")
    return value


def _ending(index: int, parts: int) -> str:
    return f"-{index + 1:05}-of-{parts:05}.gguf"
