"""MLX's own forward kernel of attention, "steel", read from the headers of the installed package, for the emulator."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
import re
import struct
from typing import Final

import forge_mlx  # noqa: F401  Before mlx.core: it loads the BLAS.
from forge_mlx.metal import emulator
from forge_mlx.metal.emulator.preamble import HEADERS
from forge_mlx.metal.include import blank, inline, line_at
import mlx.core as mx
import numpy as np

INCLUDE: Final = Path(mx.__file__).parent / "include"
KERNELS: Final = INCLUDE / "mlx/backend/metal/kernels"
# Keys of a block for each head size, and the other tiles, which all sizes share: by the names of the kernels in the
# library of mlx-metal 0.32.4 (steel_attention_float32_bq32_bk16_bd128_bv128_wm4_wn1_...), one for each of these sizes.
KEYS: Final = {64: 32, 72: 32, 80: 32, 96: 32, 128: 16, 192: 16}
QUERIES, SIMDGROUPS = 32, 4
# What the emulator does not take as Metal does, and the same in words that it takes: a `!` that ends at a `>` which the
# compiler splits off `>>>`, and `pointer += object` where the object converts to an integer.
GAPS: Final = ((">>>", "> > >"), ("src += str_y;", "src += int(str_y);"))
PARAMETERS: Final = "attn_params"
# In place of the parameters of MLX's kernel that metal_kernel does not write as MLX's kernel does.
PROLOGUE: Final = f"""\
using MaskType = T;
using AccumType = float;
const AttnParams filled = *reinterpret_cast<const device AttnParams*>({PARAMETERS});
const thread AttnParams* params = &filled;
const constant AttnMaskParams* mask_params = nullptr;
const device MaskType* mask = nullptr;
const device T* sinks = nullptr;
const uint simd_lane_id = thread_index_in_simdgroup, simd_group_id = simdgroup_index_in_threadgroup;
const uint3 tid = threadgroup_position_in_grid, lid = thread_position_in_threadgroup;
"""
_KERNEL = re.compile(r"template\s*<[^;{}()]*>\s*\[\[kernel\b[^;{}]*?\bvoid attention\(")
_CONSTANT = re.compile(r"constant bool (\w+) \[\[function_constant\(\d+\)\]\];")
_FIELD = re.compile(r"\b(int|float|int64_t) (\w+)(?:\[(\d+)\])?;")

Results = tuple[mx.array, mx.array]


def kernel_text() -> tuple[str, str]:
    """MLX's kernel: what stands before it, and its body behind a `#line`.

    Raises:
        ValueError: The installed MLX has no such header, or one of another form.
    """
    path = KERNELS / "steel/attn/kernels/steel_attention.h"
    if not path.is_file():
        raise ValueError(f"the installed MLX {version('mlx')} has no {path}.")
    text = path.read_text(encoding="utf-8")
    code = blank(text)
    found = _KERNEL.search(code)
    if found is None:
        raise ValueError(f"{path} of MLX {version('mlx')} has no kernel that begins as that of 0.32.4 does.")
    first = code.index("{", found.end()) + 1
    depth, last = 1, first
    while depth:
        depth += {"{": 1, "}": -1}.get(code[last], 0)
        last += 1
    return text[: found.start()], f'#line {line_at(text, first)} "{path.name}"\n{text[first : last - 1]}\n'


@lru_cache(maxsize=8)
def steel_kernel(aligned_queries: bool, aligned_keys: bool, causal: bool) -> Callable[..., list[mx.array]]:
    """MLX's kernel for the emulator, with its function constants set.

    Args:
        aligned_queries: Whether blocks of queries divide their number.
        aligned_keys: Whether blocks of keys do.
        causal: Whether no query sees keys after its own position.

    Raises:
        ValueError: As `kernel_text`, or a function constant that this file does not know.
    """
    constants = {"align_Q": aligned_queries, "align_K": aligned_keys, "do_causal": causal, "save_lse": True}
    constants |= {"has_mask": False, "has_sinks": False}

    def constant(match: re.Match[str]) -> str:
        if match[1] not in constants:
            raise ValueError(f"MLX {version('mlx')}: steel attention has a function constant {match[1]} that is new.")
        return f"constant constexpr bool {match[1]} = {str(constants[match[1]]).lower()};"

    before, body = kernel_text()
    path = KERNELS / "steel/attn/kernels/steel_attention.h"
    # MLX's own header, which is there before every kernel, has these.
    known = {(KERNELS / name).resolve() for name in HEADERS}
    header = inline(_CONSTANT.sub(constant, before), path, [INCLUDE], known)
    for metal, taken in GAPS:
        header = header.replace(metal, taken)
    return emulator.metal_kernel(
        name="steel_attention",
        input_names=["Q", "K", "V", PARAMETERS],
        output_names=["O", "lse"],
        source=PROLOGUE + body,
        header=f"{header}\n",
    )


def parameters(q: mx.array, k: mx.array) -> mx.array:
    """MLX's AttnParams for arrays in row order, packed in the order of its own declaration.

    Args:
        q: `[B, H, T, D]`.
        k: `[B, Hkv, S, D]`.

    Raises:
        ValueError: A field that this file does not know.
    """
    (batch, heads, queries, size), (_, kv_heads, keys, _) = q.shape, k.shape
    values: dict[str, Sequence[float]] = {"B": [batch], "H": [heads], "D": [size], "qL": [queries], "kL": [keys]}
    values |= {"gqa_factor": [heads // kv_heads], "scale": [size**-0.5], "qL_off": [keys - queries]}
    for letter, length, block in (("Q", queries, QUERIES), ("K", keys, KEYS[size])):
        values |= {f"N{letter}": [-(-length // block)], f"N{letter}_aligned": [length // block]}
        values[f"{'q' if letter == 'Q' else 'k'}L_rem"] = [length % block]
    for letter, count, length in (("Q", heads, queries), ("O", heads, queries), ("K", kv_heads, keys)):
        values[f"{letter}_strides"] = [count * length * size, length * size, size]
    values["V_strides"] = values["K_strides"]

    code = blank((KERNELS / "steel/attn/params.h").read_text(encoding="utf-8"))
    fields = _FIELD.findall(code[code.index("struct AttnParams") : code.index("struct AttnMaskParams")])
    layout, flat = "@", list[float]()
    for kind, name, count in fields:
        if name not in values:
            raise ValueError(f"MLX {version('mlx')}: AttnParams has a field {name} that is new.")
        layout += (count or "1") + {"int": "i", "float": "f", "int64_t": "q"}[kind]
        flat += values[name]
    return mx.array(np.frombuffer(struct.pack(layout, *flat), dtype=np.int64))


def steel(q: mx.array, k: mx.array, v: mx.array, *, causal: bool) -> Results:
    """out and lse by MLX's kernel on the emulator.

    Args:
        q: `[B, H, T, D]`.
        k: `[B, Hkv, S, D]`.
        v: `[B, Hkv, S, D]`.
        causal: Whether query i of T sees no key after i + S - T of S.

    Returns:
        `[B, H, T, D]` and, in float32, `[B, H, T]`.
    """
    batch, heads, queries, size = q.shape
    kernel = steel_kernel(queries % QUERIES == 0, k.shape[2] % KEYS[size] == 0, causal)
    tiles = {"BQ": QUERIES, "BK": KEYS[size], "BD": size, "BV": size, "WM": SIMDGROUPS, "WN": 1}
    out, lse = kernel(
        inputs=[q, k, v, parameters(q, k)],
        output_shapes=[q.shape, (batch, heads, queries)],
        output_dtypes=[q.dtype, mx.float32],
        grid=(32 * -(-queries // QUERIES), SIMDGROUPS * heads, batch),
        threadgroup=(32, SIMDGROUPS, 1),
        template=[("T", q.dtype), *tiles.items()],
    )
    return out, lse
