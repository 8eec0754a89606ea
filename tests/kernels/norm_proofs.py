"""What the tests of the three norms share."""

from forge_mlx.kernels._common.proof import RTOL, to_float64
from forge_mlx.kernels._common.rows import Sharing, is_long
from forge_mlx.kernels.norms import launch
from forge_mlx.metal import emulator
from forge_mlx.metal.kernel import MetalKernel
import mlx.core as mx
import numpy as np
from room_proofs import assert_close, broken, findings, random


def assert_all_close(got, want, rtol=1e-5):
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, rtol)


def assert_formula_is_exact_to_its_dtype(case):
    """reference.py against float64. `compare` takes reference.py itself for the measure, so it would not notice."""
    expected, formula = case.expected(), case.run("formula")
    assert formula.keys() == expected.keys()
    for name, truth in expected.items():
        assert formula[name].shape == truth.shape, name
        error = np.abs(to_float64(formula[name]) - truth).max(initial=0)
        assert error <= 2 * RTOL[formula[name].dtype] * np.abs(truth).max(initial=0), name


def differences(function, at, step=1e-6):
    """The gradient of a function of one array in float64, by finite differences."""
    found = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        move = np.zeros_like(at)
        move[index] = step
        found[index] = (function(at + move) - function(at - move)) / (2 * step)
    return found


def assert_gradients_agree(got, want, dtype):
    """Two gradients of one function in a dtype, each a sequence of arrays."""
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype, index
        assert_close(a.astype(mx.float32), b.astype(mx.float32), 2 * RTOL[dtype])


def second_derivative(function, *arguments):
    """Gradients of a weighted sum of the first gradients. A function of several results counts them all."""
    numbers = tuple(range(len(arguments)))

    def loss(*inner):
        results = function(*inner)
        results = results if isinstance(results, (tuple, list)) else [results]
        return sum((result**3).sum() * (1 + index) for index, result in enumerate(results))

    def first(*arguments):
        gradients = mx.grad(loss, argnums=numbers)(*arguments)
        return sum((gradient * random(gradient.shape, 9 + index)).sum() for index, gradient in enumerate(gradients))

    return mx.grad(first, argnums=numbers)(*arguments)


def found_in_broken(monkeypatch, old, new, case, sign):
    """What is found when a text of the kernels is replaced, in a case in which nothing is found before.

    Where kernels of both passes include the text, a wrong y is looked for in the forward ones and a wrong gradient in
    the backward ones: the others would only be compiled once more.
    """
    whole, launched = launch.kernel, {}

    def recorded(name):
        launched[name] = whole(name)
        return launched[name]

    # Several rows for each threadgroup, so that loops go round, and several threadgroups.
    sharing = Sharing(10 if is_long(case.shape[-1], case.dtype) else 2, 1)
    monkeypatch.setattr(launch, "FORWARD", sharing)
    monkeypatch.setattr(launch, "BACKWARD", sharing)
    monkeypatch.setattr(launch, "kernel", recorded)
    assert findings([case], "emulator") == []
    changed = {name: broken(kernel, old, new) for name, kernel in launched.items()}
    changed = {name: kernel for name, kernel in changed.items() if kernel.source != launched[name].source}
    assert changed, "the text to replace is not there"
    way = "forward" if sign.startswith("y") else "backward" if sign.startswith("d") else ""
    # A wrong gradient may come of what the forward pass leaves.
    changed = {name: kernel for name, kernel in changed.items() if way in name} or changed
    monkeypatch.setattr(launch, "kernel", lambda name: changed.get(name) or whole(name))
    found = findings([case], "emulator")
    assert "CompileError" not in found
    return found


def launched_engines(monkeypatch, function, *arguments):
    """The engines that the launches of a function and of its gradient are asked for; they all run on the emulator."""
    launched = []
    call = MetalKernel.__call__

    def on_the_emulator(self, *args, engine, **options):
        launched.append(engine)
        return call(self, *args, engine="emulator", **options)

    monkeypatch.setattr(MetalKernel, "__call__", on_the_emulator)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    mx.eval(mx.grad(function, argnums=tuple(range(len(arguments))))(*arguments))
    return launched


def counted(case):
    """Kernel -> what it moved, of a forward and a backward pass."""
    with emulator.settings(checks=("bounds",)):
        emulator.reset()
        mx.eval(case.run("emulator"))
    return {launch.name: Counts(launch) for launch in emulator.report().launches}


class Counts:
    """What a launch moved, buffer by buffer."""

    def __init__(self, record):
        self.groups = record.counts.threadgroups
        self.buffers = {each.name: each for each in record.counts.buffers}

    def read(self, name):
        """Bytes read of a buffer, and by how many accesses."""
        return self.buffers[name].bytes_read, self.buffers[name].reads

    def written(self, name):
        return self.buffers[name].bytes_written, self.buffers[name].writes
