"""Kernels of given inputs as the emulator generates and translates them, and their syntax trees."""

from typing import Any

from forge_mlx.metal.emulator import toolchain
from forge_mlx.metal.emulator.translate import translate
from forge_mlx.metal.signature import GeneratedSource, Input, Output, generate
import mlx.core as mx


def generated(body: str, header: str = "", template: Any = (), **options: Any) -> GeneratedSource:
    """The kernel `k` with inputs x of float, b of bfloat, n of int and outputs out of float, narrow of bfloat."""
    return generate(
        "k",
        [Input("x", mx.float32, 64, 1), Input("b", mx.bfloat16, 64, 1), Input("n", mx.int32, 1, 0)],
        [Output("out", mx.float32), Output("narrow", mx.bfloat16)],
        body,
        header,
        template=list(template),
        **options,
    )


def tree_of(body: str, header: str = "", template: Any = (), **options: Any) -> dict[str, Any]:
    """Its syntax tree."""
    return toolchain.dump_ast(translate(generated(body, header, template, **options)), preamble=True)
