"""What the tests of the functions of a simdgroup share: launching a body, and the values that lanes should get."""

from collections.abc import Callable
import re
from typing import Any

from forge_mlx.metal import emulator
from forge_mlx.metal.emulator.toolchain import CompilerFailure, compile_source
from forge_mlx.metal.emulator.translate import translate
from forge_mlx.metal.signature import Input, Output, generate
import mlx.core as mx
import numpy as np
import pytest

DTYPES: dict[str, mx.Dtype] = {
    "char": mx.int8,
    "uchar": mx.uint8,
    "short": mx.int16,
    "ushort": mx.uint16,
    "int": mx.int32,
    "uint": mx.uint32,
    "half": mx.float16,
    "float": mx.float32,
}
NUMPY: dict[str, Any] = {
    "char": np.int8,
    "uchar": np.uint8,
    "short": np.int16,
    "ushort": np.uint16,
    "int": np.int32,
    "uint": np.uint32,
    "half": np.float16,
    "float": np.float32,
}
INTEGERS = ("char", "uchar", "short", "ushort", "int", "uint")


def launch(
    body: str,
    inputs: dict[str, mx.array | np.ndarray],
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    *,
    threads: int = 32,
    template: tuple[tuple[str, Any], ...] = (),
    header: str = "",
    init_value: float | None = None,
    atomic_outputs: bool = False,
    **settings: Any,
) -> np.ndarray:
    """Run a body on one threadgroup; the output `y`, a bfloat one as its bits. Every check is on, as by default."""
    kernel = emulator.metal_kernel(
        name="lanes",
        input_names=list(inputs),
        output_names=["y"],
        source=body,
        header=header,
        atomic_outputs=atomic_outputs,
    )
    with emulator.settings(**settings):
        y = kernel(
            inputs=[x if isinstance(x, mx.array) else mx.array(x) for x in inputs.values()],
            template=list(template),
            grid=(threads, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[shape],
            output_dtypes=[dtype],
            init_value=init_value,
        )[0]
    return np.array(y.view(mx.uint16) if dtype == mx.bfloat16 else y)


def refusals(lines: list[str], *, atomic_outputs: bool = False, mlx_preamble: bool = True) -> list[str]:
    """What the compiler says of each of these lines; every one must be refused. `x` holds floats, the output `y` uints.

    The compiler itself is asked, since a `CompileError` tells the first errors only.
    """
    generated = generate(
        "lanes",
        [Input("x", mx.float32, 64, 1)],
        [Output("y", mx.uint32)],
        "".join(f"{{ {line} }}\n" for line in ["uint lane = thread_index_in_simdgroup;", *lines]),
        "" if mlx_preamble else "using namespace metal;\n",
        atomic_outputs=atomic_outputs,
    )
    with pytest.raises(CompilerFailure) as raised:
        compile_source(translate(generated), instrument=False, preamble=mlx_preamble)
    said = [""] * len(lines)
    for message in re.split(r"(?m)^(?=.*: error: )", raised.value.stderr):
        where = re.search(r"lanes body:(\d+):", message)
        if where is not None:
            said[int(where[1]) - 2] += message
    assert [line for line, message in zip(lines, said, strict=True) if not message] == []
    return said


def random_lanes(kind: str, components: int = 1, seed: int = 0) -> np.ndarray:
    """Values of 32 lanes, `[32, components]`; floats of several magnitudes, so that another order shows."""
    rng = np.random.default_rng([seed, components, len(kind)])
    size = (32, components)
    if kind in INTEGERS:
        info = np.iinfo(NUMPY[kind])
        return rng.integers(info.min, info.max, size, dtype=NUMPY[kind], endpoint=True)
    exponents = rng.integers(-6, 7, size) if kind == "float" else rng.integers(-2, 3, size)
    return (rng.standard_normal(size) * 2.0**exponents).astype(NUMPY[kind])


def wide(kind: str) -> Any:
    """The NumPy type that sums and products of a type are computed in."""
    return np.float32 if kind == "half" else NUMPY[kind]


def tree(values: np.ndarray, active: np.ndarray, combine: Callable[..., Any], neutral: float, kind: str) -> np.ndarray:
    """Pairs of neighbours, then pairs of pairs: one value a component, `[components]`."""
    level = np.where(active[:, None], values.astype(wide(kind)), np.asarray(neutral, wide(kind)))
    with np.errstate(over="ignore"):
        while len(level) > 1:
            level = combine(level[0::2], level[1::2])
        return level[0].astype(NUMPY[kind])


def scan(
    values: np.ndarray, active: np.ndarray, combine: Callable[..., Any], first: int, kind: str, *, inclusive: bool
) -> np.ndarray:
    """What each active lane gets of those below it (and itself), from the lowest upwards, `[lanes, components]`."""
    result = np.zeros_like(values)
    total = np.full(values.shape[1], first, wide(kind))
    with np.errstate(over="ignore"):
        for lane in np.flatnonzero(active):
            after = combine(total, values[lane].astype(wide(kind)))
            result[lane] = (after if inclusive else total).astype(NUMPY[kind])
            total = after
    return result
