"""A small kernel with one bug, what the emulator must say about it, and the same kernel without the bug."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from forge_mlx.metal import emulator
from forge_mlx.metal.emulator import MetalError, MetalWarning
import mlx.core as mx
import numpy as np
import pytest

# Comments that mark the lines of an exception: the access that fails, and the earlier one that it conflicts with.
MARKS = ("// here", "// and here")
BOTH = "// both here"


@dataclass(frozen=True)
class Pattern:
    """A launch that must be refused, and its corrected twin.

    Attributes:
        name: the test's id.
        error: what the launch raises; a warning where the kernel is legal.
        body: the kernel's body. `// here` stands on the line that the exception names first, `// and here` on the
            second one, `// both here` on a line that it names twice.
        fix: text -> its replacement in body and header, and `launch`: fields of this class, for the corrected twin.
        want: the twin's first output, of the inputs as NumPy arrays.
        threads: linear index in its threadgroup of each thread that the exception names.
        groups: x position of the threadgroup of each of these threads, where it matters.
        buffer: the buffer or array that it names.
        index: the element that it names.
        says: what else its message must hold.
    """

    name: str
    error: type[MetalError | MetalWarning]
    body: str
    fix: dict[str, str]
    want: Callable[..., Any]
    threads: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    buffer: str | None = None
    index: int | None = None
    says: str | None = None
    inputs: dict[str, mx.array] = field(default_factory=lambda: {"x": mx.arange(64, dtype=mx.float32)})
    output_names: tuple[str, ...] = ("out",)
    shape: tuple[int, ...] = (64,)
    dtype: mx.Dtype = mx.float32
    grid: tuple[int, int, int] = (64, 1, 1)
    threadgroup: tuple[int, int, int] = (64, 1, 1)
    template: tuple[tuple[str, Any], ...] = ()
    header: str = ""
    init_value: float | None = None
    atomic_outputs: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    launch: dict[str, Any] = field(default_factory=dict)

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return "".join(letter if letter.isalnum() else "_" for letter in self.name)

    def twin(self) -> "Pattern":
        """The corrected kernel and launch."""
        body, header = self.body, self.header
        for old, new in self.fix.items():
            assert (body + header).count(old) == 1, f"{self.name}: {old!r} must occur once"
            body, header = body.replace(old, new), header.replace(old, new)
        return replace(self, body=body, header=header, **self.launch)

    def lines(self) -> list[tuple[str, int]]:
        """File and line of each mark, in the order of `MARKS`."""
        found = {}
        for file, text in ((f"{self.kernel} header", self.header), (f"{self.kernel} body", self.body)):
            for number, line in enumerate(text.split("\n"), start=1):
                marks = MARKS if line.endswith(BOTH) else [mark for mark in MARKS if line.endswith(mark)]
                found.update(dict.fromkeys(marks, (file, number)))
        return [found[mark] for mark in MARKS if mark in found]

    def run(self) -> list[np.ndarray]:
        """Launch it; the outputs."""
        kernel = emulator.metal_kernel(
            name=self.kernel,
            input_names=list(self.inputs),
            output_names=list(self.output_names),
            source=self.body,
            header=self.header,
            atomic_outputs=self.atomic_outputs,
        )
        with emulator.settings(**self.settings):
            outputs = kernel(
                inputs=list(self.inputs.values()),
                template=list(self.template),
                grid=self.grid,
                threadgroup=self.threadgroup,
                output_shapes=[self.shape] * len(self.output_names),
                output_dtypes=[self.dtype] * len(self.output_names),
                init_value=self.init_value,
            )
            mx.eval(outputs)
        return [np.array(output) for output in outputs]


def check_refused(pattern: Pattern) -> None:
    """The kernel with the bug is refused for the right reason, and the message says where."""
    if issubclass(pattern.error, MetalWarning):
        with pytest.warns(pattern.error, match=pattern.says) as caught:
            pattern.run()
        for file, line in pattern.lines():
            assert f"{file}:{line}" in str(caught[0].message)
        return
    with pytest.raises(pattern.error, match=pattern.says) as info:
        pattern.run()
    error = info.value
    assert type(error) is pattern.error
    assert error.kernel == pattern.kernel
    assert pattern.kernel in str(error)
    assert [(location.file, location.line) for location in error.locations] == pattern.lines()
    for location in error.locations:
        assert str(location) in str(error)
    assert tuple(thread.index for thread in error.threads) == pattern.threads
    assert pattern.groups == () or tuple(thread.group[0] for thread in error.threads) == pattern.groups
    assert (error.buffer, error.index) == (pattern.buffer, pattern.index)
    assert error.buffer is None or error.buffer in str(error)


def check_twin_passes(pattern: Pattern) -> None:
    """Without the bug there is no finding, no warning and the right result, whatever the order of threads."""
    twin = pattern.twin()
    twin = replace(twin, settings={**twin.settings, "schedules": 3})
    got = twin.run()[0]
    want = np.asarray(twin.want(*(np.array(array) for array in twin.inputs.values())))
    np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape))
