"""The signature that MLX writes for a kernel, and the one in the kernel's own file, each read on its own."""

from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
import re

from forge_mlx.metal import apple
from forge_mlx.metal.checked_launch import Launch, check_launch
from forge_mlx.metal.source import KernelSource
import mlx.core as mx

SPELLINGS = {
    **{"half": "float16_t", "bfloat": "bfloat16_t", "int": "int32_t", "uint": "uint32_t", "long": "int64_t"},
    **{"char": "int8_t", "uchar": "uint8_t", "short": "int16_t", "ushort": "uint16_t", "ulong": "uint64_t"},
}
DTYPES = {
    **{"float": mx.float32, "float16_t": mx.float16, "bfloat16_t": mx.bfloat16, "bool": mx.bool_},
    **{f"{sign}int{bits}_t": getattr(mx, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
PARAMETER = re.compile(
    r"(?P<words>(?:\w+\s+)*?)(?P<type>\w+(?:\s*<\s*\w+\s*>)?)\s*(?P<mark>[*&]?)\s*(?P<name>\w+)\s*"
    r"(?:\[\[\s*(?P<attribute>\w+)\s*(?:\(\s*(?P<index>\d+)\s*\))?\s*\]\])?"
)

Buffer = tuple[str, str, str, bool, str]


def read(text: str, types: dict[str, str]) -> tuple[list[Buffer], set[tuple[str, str]]]:
    """The parameters of the only kernel in a text.

    Args:
        text: Metal source.
        types: template parameter -> the type that it stands for.

    Returns:
        Name, address space, type, whether it may be written, and mark (`*` or `&`) of each buffer in order; type and
        name of each attribute.
    """
    code = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
    listed = re.search(r"(?:\[\[\s*kernel\s*\]\]|\bkernel)\s+void\s+\w+\s*\((.*?)\)\s*\{", code, re.DOTALL)[1]
    buffers, attributes = [], set()
    for piece in re.split(r",(?![^<]*>)", listed):
        found = PARAMETER.fullmatch(piece.strip())
        assert found, piece
        if not found["mark"]:
            assert found["name"] == found["attribute"], piece
            attributes.add((found["type"], found["name"]))
            continue
        words = found["words"].split()
        (space,) = {"device", "constant"} & set(words)
        element = re.sub(
            r"\b(\w+)\b", lambda match: types.get(match[0], SPELLINGS.get(match[0], match[0])), found["type"]
        )
        element = re.sub(r"atomic_(\w+)", lambda match: f"atomic<{SPELLINGS.get(match[1], match[1])}>", element)
        assert found["index"] in (None, str(len(buffers))), piece
        writable = space == "device" and "const" not in words
        buffers.append((found["name"], space, element.replace(" ", ""), writable, found["mark"]))
    return buffers, attributes


def some_launch(source: KernelSource, dtype: mx.Dtype) -> Launch:
    """A launch of a kernel about which only its signature is known.

    Args:
        source: the kernel.
        dtype: for every type parameter of its template.
    """
    template = {each.name: {"typename": dtype, "int": 8, "bool": True}[each.kind] for each in source.template}
    dtypes = [template.get(array.type) or DTYPES[array.type] for array in source.inputs]
    shapes = [() if array.is_reference else (2, 3, 4) if array.space == "device" else (3,) for array in source.inputs]
    return check_launch(
        source,
        [mx.zeros(shape, dtype=each) for shape, each in zip(shapes, dtypes, strict=True)],
        output_shapes=[(4,)] * len(source.outputs),
        output_dtypes=[template.get(array.type) or DTYPES[array.type] for array in source.outputs],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        template=template,
        init_value=None,
        ensure_row_contiguous=True,
        math_mode="safe",
        verbose=False,
    )


def traced(launch: Launch) -> str:
    """The text that MLX would compile for what the engine "metal" hands to it, seen without Metal.

    Args:
        launch: what is launched.
    """
    seen: list[dict] = []
    mx.export_function(seen.append, lambda *arrays: apple.run(replace(launch, inputs=arrays)), *launch.inputs)
    (text,) = [each["arguments"][1] for each in seen if each.get("name") == "CustomKernel"]
    return text


def differences(file: Path, source: KernelSource, dtype: mx.Dtype) -> list[str]:
    """One line for each parameter in which MLX's signature and the file's differ.

    Args:
        file: the `.metal` file.
        source: what `load` made of it.
        dtype: for every type parameter of its template.
    """
    launch = some_launch(source, dtype)
    names = {value: name for name, value in DTYPES.items()}
    types = {name: names[value] for name, value in launch.template if isinstance(value, mx.Dtype)}
    own, mlx = read(file.read_text(encoding="utf-8"), types), read(traced(launch), types)
    found = [f"buffer {a} in the file, {b} from MLX" for a, b in zip_longest(own[0], mlx[0]) if a != b]
    found += [f"only in the file: {each}" for each in sorted(own[1] - mlx[1])]
    return found + [f"only from MLX: {each}" for each in sorted(mlx[1] - own[1])]
