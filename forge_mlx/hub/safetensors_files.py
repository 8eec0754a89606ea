"""The safetensors files of a model folder: found, checked against their length, and read as they are needed.

A folder may come from anywhere. Names in an index are plain names of files in the folder. A link is followed where it
stays in the folder, or leads from a snapshot of the Hugging Face cache to the cache's own blobs; any other is refused.
Pickles (`.bin`, `.pt`, ...) are never read: they run code.
"""

from itertools import pairwise
import math
from pathlib import Path
import re
from typing import Any, Final, NamedTuple

from forge_mlx._text import one_line, short_json
from forge_mlx.hub.errors import HubError
from forge_mlx.hub.json_files import parse_object, read_object
from forge_mlx.hub.regular_files import regular_size
import mlx.core as mx

_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_NUMBERED: Final = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
_PICKLES: Final = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".h5", ".msgpack")
# Where the Hugging Face cache has a model's folders.
_SNAPSHOTS: Final = "snapshots"
# The format's own limit on a header.
_LARGEST_HEADER: Final = 100_000_000
_LENGTH_BYTES: Final = 8
# More than any model has, and few enough for a message.
_MOST_AXES: Final = 16
_LONGEST_NAME: Final = 250
_SHOWN: Final = 80
# Bytes of an element of what MLX reads as it is. It has no F64, and takes F8_E4M3 for bytes: wrong weights.
_SIZES: Final = {
    **{"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2},
    **{"U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8},
}


class _Tensor(NamedTuple):
    """Where the bytes of a tensor lie, counted from the end of the header."""

    name: str
    begin: int
    end: int


def load_tensors(folder: Path) -> dict[str, mx.array]:
    """All tensors of a model folder by their names, unread until they are evaluated.

    Args:
        folder: Holds `model.safetensors`, or shards with their index.

    Raises:
        HubError: There are none, a file is missing, damaged, or outside the folder, or a tensor is there twice.
    """
    found: dict[str, mx.array] = {}
    wanted, files = weight_files(folder)
    for file in files:
        check_header(file)
        tensors = _read(file)
        twice = next((name for name in tensors if name in found), None)
        if twice is not None:
            raise HubError(f"{file}: {twice} must be in one file but is in another one too.")
        missing = [name for name, its_file in wanted.items() if its_file == file.name and name not in tensors]
        if missing:
            raise HubError(
                f"{file}: must hold what {_INDEX} says but {missing[0]} and {len(missing) - 1} more are missing. "
                "Download it again."
            )
        found |= tensors
    return found


def write_tensors(file: Path, tensors: dict[str, mx.array], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file.

    Args:
        file: Where to.
        tensors: Name -> array of any shape.
        metadata: What its header says beside them.

    Raises:
        OSError: It cannot be written.
    """
    # Through Python's file: MLX's own writer does not say why it failed.
    with file.open("wb") as opened:
        mx.save_safetensors(opened, tensors, metadata)


def own_file(folder: Path, name: str) -> Path:
    """The path of a file of a folder, which neither its name nor a link takes elsewhere.

    Args:
        folder: The folder.
        name: A plain name.

    Raises:
        HubError: The name is none, or a link leads out of the folder, other than to the Hugging Face cache's blobs.
    """
    if not name or name in (".", "..") or any(char in name for char in "/\\:\0"):
        raise HubError(f"{folder}: a file must be named without a path but got {_short(name)}.")
    file = folder / name
    try:
        is_link, target, home = file.is_symlink(), file.resolve(), folder.resolve()
    except (OSError, RuntimeError) as error:
        # RuntimeError: links in a circle.
        reason = getattr(error, "strerror", None) or error
        raise HubError(f"{folder}: {short_json(name)} must be a file of it but: {reason}.") from None
    if is_link:
        blobs = home.parent.parent / "blobs"
        of_cache = home.parent.name == _SNAPSHOTS and target.parent == blobs
        if not (of_cache or home in target.parents):
            raise HubError(f"{file}: must stay in its folder but is a link to {target}. Copy the file.")
    return file


def check_header(file: Path) -> None:
    """Compare the header of a safetensors file with its length, before anything reads by it.

    Raises:
        HubError: It is no regular file, the header is damaged, or tensors overlap, leave gaps, or do not end where the
            file does.
    """
    try:
        size = regular_size(file)
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _LARGEST_HEADER):
                raise HubError(
                    f"{file}: must be a safetensors file but has {size} bytes and a header of {length}: it is cut "
                    "short or something else. Download it again."
                )
            content = opened.read(length)
    except OSError as error:
        raise HubError(f"{file}: cannot be read: {error.strerror or error}.") from None
    header = parse_object(content, f"{file}: its header")
    header.pop("__metadata__", None)
    tensors = sorted((_place(file, name, entry) for name, entry in header.items()), key=lambda each: each[1:])
    _check_places(file, tensors, size - _LENGTH_BYTES - length)


def weight_files(folder: Path) -> tuple[dict[str, str], list[Path]]:
    """Tensor -> file as an index says, and the files.

    Args:
        folder: Of a model.

    Raises:
        HubError: There are none, one is missing, or an index or a link leads elsewhere.
    """
    if (folder / _SINGLE).exists():
        return {}, [own_file(folder, _SINGLE)]
    if (folder / _INDEX).exists():
        return _indexed(own_file(folder, _INDEX))
    numbered = sorted(file.name for file in folder.iterdir() if _NUMBERED.fullmatch(file.name))
    if numbered:
        total = numbered[-1][-17:-12]
        absent = [f"model-{n + 1:05d}-of-{total}.safetensors" for n in range(int(total))]
        absent = [name for name in absent if name not in numbered]
        if absent or len(numbered) != int(total):
            raise HubError(f"{folder}: must hold {int(total)} shards but {(absent or numbered)[0]} does not fit.")
        return {}, [own_file(folder, name) for name in numbered]
    raise HubError(_nothing(folder))


def _nothing(folder: Path) -> str:
    names = sorted(file.name for file in folder.iterdir())
    pickles = [name for name in names if name.endswith(_PICKLES)]
    start = f"{folder}: must hold {_SINGLE} or {_INDEX} but has"
    if pickles:
        return f"{start} only {pickles[0]}, a pickle, which can run code and is not read. Get the safetensors of it."
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        return f"{start} {ggufs[0]}. Give that file itself."
    others = [name for name in names if name.endswith(".safetensors")]
    if not others and folder.resolve().parent.name == _SNAPSHOTS:
        return (
            f"{start} no weights, and pickles, which can run code, are not downloaded. Get another model, or go online "
            "if this one's were not downloaded yet."
        )
    return f"{start} {others[0] if others else 'no weights'}."


def _indexed(index: Path) -> tuple[dict[str, str], list[Path]]:
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise HubError(f"{index}: weight_map must say for each tensor the file that it is in.")
    for tensor in places:
        _check_name(index, tensor)
    files = []
    for name in sorted(set(places.values())):
        if not name.endswith(".safetensors") or not _is_text(name):
            raise HubError(f"{index}: weight_map must name safetensors files but got {_short(name)}.")
        file = own_file(index.parent, name)
        if not file.is_file():
            raise HubError(f"{file}: is missing, which {index.name} names. Download it again.")
        files.append(file)
    return places, files


def _place(file: Path, name: str, entry: Any) -> _Tensor:
    """Where one tensor lies, its length checked against its shape."""
    _check_name(file, name)
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise HubError(f"{file}: {name} must have a dtype, a shape and data_offsets but has {short_json(entry)}.")
    if not isinstance(dtype, str) or dtype not in _SIZES:
        raise HubError(f"{file}: {name} must be of a dtype among {', '.join(_SIZES)} but is {short_json(dtype)}.")
    if len(shape) > _MOST_AXES:
        raise HubError(f"{file}: {name} must have at most {_MOST_AXES} axes but has {len(shape)}.")
    begin, end = offsets
    wanted = math.prod(shape) * _SIZES[dtype]
    if end - begin != wanted:
        raise HubError(f"{file}: {name} must have {wanted} bytes, {dtype} of {shape}, but has {end - begin}.")
    return _Tensor(name, begin, end)


def _check_name(file: Path, tensor: str) -> None:
    if len(tensor) > _LONGEST_NAME or not _is_text(tensor):
        raise HubError(
            f"{file}: a tensor must have a name of at most {_LONGEST_NAME} characters but one has {len(tensor)}: "
            f"{_short(tensor)}."
        )


def _is_text(name: str) -> bool:
    """Whether a name is UTF-8: JSON may also say half a character."""
    return not any("\ud800" <= char <= "\udfff" for char in name)


def _short(name: str) -> str:
    """A name from anywhere, for a message of one line."""
    return repr(name if len(name) <= _SHOWN else f"{name[:_SHOWN]}...")


def _sizes(value: Any) -> list[int] | None:
    are_sizes = isinstance(value, list) and all(type(each) is int and 0 <= each < 1 << 62 for each in value)
    return value if are_sizes else None


def _check_places(file: Path, tensors: list[_Tensor], length: int) -> None:
    """Raise unless tensors follow each other without a gap from 0 to the end of the file."""
    start = _Tensor("the data", 0, 0)
    for before, tensor in pairwise([start, *tensors]):
        if tensor.begin != before.end:
            problem = "overlaps" if tensor.begin < before.end else "leaves a gap behind"
            raise HubError(f"{file}: {tensor.name} must begin where {before.name} ends but {problem} it.")
    end = tensors[-1] if tensors else start
    if end.end != length:
        problem = "is cut short: download it again" if end.end > length else "has more behind it"
        raise HubError(f"{file}: must end with {end.name}, {end.end} bytes of data, but has {length}: it {problem}.")


def _read(file: Path) -> dict[str, mx.array]:
    try:
        tensors = mx.load(str(file), format="safetensors")
    except (RuntimeError, ValueError) as error:
        raise HubError(f"{file}: cannot be read: {one_line(error)}.") from None
    assert isinstance(tensors, dict)
    return tensors
