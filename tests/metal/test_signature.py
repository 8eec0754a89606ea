"""The generated source against what MLX itself prints when it traces the same kernel."""

from dataclasses import dataclass, field, replace

from forge_mlx.metal.signature import ATTRIBUTES, TYPE_NAMES, GeneratedSource, Input, Output, generate
import mlx.core as mx
import pytest

F32 = mx.float32


@dataclass(frozen=True)
class Case:
    """One call of `metal_kernel`: the arguments that its text depends on."""

    name: str
    inputs: dict[str, tuple[mx.Dtype, tuple[int, ...]]] = field(default_factory=lambda: {"x": (F32, (4, 16))})
    outputs: dict[str, mx.Dtype] = field(default_factory=lambda: {"out": F32})
    source: str = "out[0] = x[thread_position_in_grid.x];"
    header: str = ""
    template: tuple[tuple[str, mx.Dtype | int | bool], ...] = ()
    atomic_outputs: bool = False

    def generated(self) -> GeneratedSource:
        """What this project writes."""
        arrays = self.arrays()
        return generate(
            self.name,
            [Input(name, arrays[name].dtype, arrays[name].size, arrays[name].ndim) for name in self.inputs],
            [Output(name, dtype) for name, dtype in self.outputs.items()],
            self.source,
            self.header,
            template=self.template,
            atomic_outputs=self.atomic_outputs,
        )

    def arrays(self) -> dict[str, mx.array]:
        """Inputs of the right type and shape."""
        return {name: mx.zeros(shape, dtype=dtype) for name, (dtype, shape) in self.inputs.items()}


def printed(case: Case, path: str, capfd: pytest.CaptureFixture[str]) -> str:
    """What MLX would compile. It prints the text while it traces, without a Metal device."""
    kernel = mx.fast.metal_kernel(
        name=case.name,
        input_names=list(case.inputs),
        output_names=list(case.outputs),
        source=case.source,
        header=case.header,
        atomic_outputs=case.atomic_outputs,
    )

    def launch(*arrays: mx.array) -> list[mx.array]:
        return kernel(
            inputs=list(arrays),
            template=list(case.template),
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)] * len(case.outputs),
            output_dtypes=list(case.outputs.values()),
            verbose=True,
        )

    capfd.readouterr()
    mx.export_function(path, launch, *case.arrays().values())
    # Tracing runs the function more than once.
    return capfd.readouterr().out.split(f"Generated source code for `{case.name}`:\n```\n")[1].removesuffix("\n```\n")


SHAPES = {"shaped": (4, 16), "seven": (7,), "eight": (8,), "empty": (0, 3), "scalar": ()}
# MLX writes a text for float64 too, and then says that no GPU has it.
DTYPES = [dtype for dtype in TYPE_NAMES if dtype != mx.float64]
CASES = [
    Case("minimal"),
    Case("no_attributes", source="out[0] = x[0];"),
    *(Case(f"dtype_{dtype}".replace("mlx.core.", ""), {"x": (dtype, (9,))}, {"out": dtype}) for dtype in DTYPES),
    *(Case(f"shape_{name}", {"x": (mx.float16, shape)}) for name, shape in SHAPES.items()),
    Case(
        "shapes_of_each",
        {name: (mx.int8, shape) for name, shape in SHAPES.items()},
        source="".join(f"use({name}_{what});" for name in SHAPES for what in ("shape", "strides", "ndim")),
    ),
    Case("shape_in_comment", source="// x_shape and x_strides\nout[0] = 1; /* thread_index_in_simdgroup */"),
    Case("shape_in_longer_name", source="out[0] = my_x_shaped;"),
    Case("attribute_in_longer_name", source="uint my_grid_size_ = 1; out[0] = my_grid_size_;"),
    Case("every_attribute", source="\n".join(reversed(ATTRIBUTES))),
    *(Case(f"only_{attribute}", source=f"use({attribute});") for attribute in ATTRIBUTES),
    Case("template_types", template=(("T", mx.bfloat16), ("U", mx.complex64), ("V", mx.bool_), ("W", mx.int64))),
    Case("template_values", template=(("N", 128), ("M", -4), ("YES", True), ("NO", False), ("ZERO", 0))),
    Case("template_mixed", template=(("T", F32), ("N", -2147483648), ("B", True))),
    Case("several_outputs", outputs={"a": mx.float16, "b": mx.int32, "c": mx.bool_}, source="a[0] = b[0] = c[0] = 1;"),
    Case("broken_by_mlx", outputs={"a": F32, "b": F32, "c": F32}, source="a[0] = b[0] = c[0] = x_shape[0];"),
    Case("no_inputs", {}, source="out[0] = 1;"),
    Case(
        "atomic", outputs={"a": F32, "b": mx.uint32}, source="use(a, b, thread_position_in_grid);", atomic_outputs=True
    ),
    Case("header", header="// a\nconstant float PI = 3.1f;\n"),
    Case("header_without_line_break", header="constant int N = 4;"),
    Case("odd text", source='\n\n  out[0] = "\\t{}"; // %s ü\r\n\t', header="/* { */\n"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_text_is_what_mlx_compiles(case, tmp_path, capfd):
    assert case.generated().text == printed(case, str(tmp_path / "traced.mlxfn"), capfd)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_parts_are_parts_of_the_text(case):
    generated = case.generated()
    assert generated.text.startswith(f"{case.header}{generated.signature}{case.source}\n}}\n")
    for index, parameter in enumerate(generated.parameters):
        assert f"  {parameter.declaration} [[buffer({index})]]" in generated.signature
    assert [name for name in ATTRIBUTES if f" [[{name}]]" in generated.signature] == list(generated.attributes)


def test_parameters_say_what_each_buffer_is():
    case = Case(
        "parameters",
        {"x": (mx.bfloat16, (4, 16)), "few": (mx.complex64, (7,)), "one": (mx.int64, ())},
        {"out": mx.uint8},
        source="x_ndim few_shape few_strides one_shape",
        atomic_outputs=True,
    )
    found = {each.name: each for each in case.generated().parameters}
    assert list(found) == ["x", "x_ndim", "few", "few_shape", "few_strides", "one", "out"]
    assert [each.role for each in found.values()] == ["input", "ndim", "input", "shape", "strides", "input", "output"]
    assert [each.space for each in found.values()] == ["device", *["constant"] * 5, "device"]
    assert [each.type for each in found.values()] == [
        *("bfloat16_t", "int", "complex64_t", "int", "int64_t", "int64_t", "uint8_t"),
    ]
    assert {name for name, each in found.items() if each.is_reference} == {"x_ndim", "one"}
    assert {name for name, each in found.items() if not each.is_const} == {"out"}
    assert {name for name, each in found.items() if each.atomic} == {"out"}


def test_template_arguments_are_kept_as_spelled():
    template = (("T", mx.float16), ("N", -4), ("B", True))
    assert Case("spelled", template=template).generated().template == (("T", "float16_t"), ("N", "-4"), ("B", "1"))


def test_places_default_to_the_name_and_can_be_given():
    generated = Case("where").generated()
    assert (generated.header_file, generated.header_line) == ("where header", 1)
    assert (generated.body_file, generated.body_line) == ("where body", 1)
    given = generate("where", [], [Output("out", F32)], "", body_file="a.metal", body_line=12, header_file="b.h")
    assert (given.body_file, given.body_line, given.header_file) == ("a.metal", 12, "b.h")


def test_the_name_tells_every_text_apart():
    case = Case("named", source="out[0] = T(x[0]);", template=(("T", F32),))
    others = [
        replace(case, template=(("T", mx.float16),)),
        replace(case, inputs={"x": (F32, (3,))}),
        replace(case, inputs={"x": (F32, ())}),
        replace(case, outputs={"out": mx.float16}),
    ]
    assert len({each.generated().kernel_name for each in [case, *others]}) == 5
