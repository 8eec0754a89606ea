"""What the tests of attention in plain operations share: cases, and the truth by PyTorch's autograd in float64."""

from dataclasses import dataclass
import math

from forge_mlx.kernels.attention.options import Options
import mlx.core as mx
import numpy as np
import torch


@dataclass(frozen=True)
class Problem:
    """Arrays and options of one call.

    Args:
        heads: H and Hkv.
        lengths: T and S.
        sizes: D and Dv.
        causal: As the op takes it.
        window: As the op takes it.
        softcap: As the op takes it.
        segments: How many ids there are, in no order, padding among them; 0 for none, -1 for padding alone.
        sinks: Whether there are sinks.
        magnitude: 0 for normal numbers, else whole ones whose scores are exact and go up to about this.
        dtype: Of q, k and v.
    """

    heads: tuple[int, int] = (2, 2)
    lengths: tuple[int, int] = (9, 9)
    sizes: tuple[int, int] = (8, 8)
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    segments: int = 0
    sinks: bool = False
    magnitude: float = 0.0
    dtype: mx.Dtype = mx.float32

    @property
    def options(self):
        # A power of 2, so that whole numbers stay exact.
        scale = 2.0 ** round(math.log2(self.magnitude / 64)) if self.magnitude else 0.4
        return Options(scale, self.causal, self.window, self.softcap)

    @property
    def keywords(self):
        """The options as the public ops take them."""
        options = self.options
        return {"scale": options.scale, "causal": self.causal, "window": self.window, "softcap": self.softcap}

    def inputs(self):
        """q, k, v and, if there are any, sinks `[2, H]`."""
        random = np.random.default_rng(1)
        (heads, kv_heads), (queries, keys), (size, v_size) = self.heads, self.lengths, self.sizes
        shapes = [(2, heads, queries, size), (2, kv_heads, keys, size), (2, kv_heads, keys, v_size)]
        arrays = [random.normal(size=shape) for shape in shapes]
        if self.magnitude:
            arrays[:2] = [random.integers(-4, 5, shape) for shape in shapes[:2]]
        arrays = [mx.array(array.astype(np.float32)).astype(self.dtype) for array in arrays]
        return [*arrays, mx.array(random.normal(size=(2, heads)).astype(np.float32))] if self.sinks else arrays

    def ids(self):
        """Ids of queries and keys, or None twice."""
        if not self.segments:
            return None, None
        random = np.random.default_rng(2)
        low, high = (-2, 0) if self.segments < 0 else (-1, self.segments)
        queries, keys = self.lengths
        ids = random.integers(low, high, (2, keys))
        own = ids if queries == keys else random.integers(low, high, (2, queries))
        return mx.array(own.astype(np.int32)), mx.array(ids.astype(np.int32))

    def cotangents(self, with_probs=False):
        """Of out, lse and, if wanted, the probabilities."""
        random = np.random.default_rng(3)
        (heads, _), (queries, keys) = self.heads, self.lengths
        shapes = [(2, heads, queries, self.sizes[1]), (2, heads, queries), (2, heads, queries, keys)]
        found = [mx.array(random.normal(size=shape).astype(np.float32)) for shape in shapes]
        dtypes = [self.dtype, mx.float32, self.dtype]
        return [array.astype(dtype) for array, dtype in zip(found, dtypes, strict=True)][: 2 + with_probs]

    def arrange(self, arrays):
        """q, k, v, both ids and sinks, as the room's functions take them."""
        q, k, v, *sinks = arrays
        return q, k, v, *self.ids(), sinks[0] if sinks else None

    def seen(self):
        """Truth values `[2, 1, T, S]`, pair by pair."""
        queries, keys = self.lengths
        own, ids = (None if each is None else each.tolist() for each in self.ids())

        def sees(b, i, j):
            ahead = j - (i + keys - queries)
            hidden = self.causal and (ahead > 0 or (self.window is not None and ahead <= -self.window))
            return not hidden and (own is None or own[b][i] == ids[b][j] >= 0)

        return [[[[sees(b, i, j) for j in range(keys)] for i in range(queries)]] for b in range(2)]


EVERYTHING = {"heads": (4, 2), "sizes": (8, 16), "window": 5, "softcap": 2.0, "segments": 2, "sinks": True}
PROBLEMS = {
    "plain": Problem(),
    "window": Problem(window=3),
    "window of 1": Problem(window=1, sinks=True),
    "softcap": Problem(softcap=2.0, causal=False),
    "ids": Problem(segments=3, heads=(2, 1)),
    "padding": Problem(segments=-1),
    "padding and sinks": Problem(segments=-1, sinks=True),
    "sinks": Problem(sinks=True, heads=(4, 2)),
    "full": Problem(causal=False, lengths=(5, 12), sizes=(16, 8)),
    "more keys": Problem(lengths=(4, 11), window=4),
    "more queries": Problem(lengths=(11, 4), heads=(3, 1)),
    "large scores": Problem(lengths=(17, 17), magnitude=1e4, softcap=50.0, causal=False),
    "everything": Problem(**EVERYTHING, lengths=(19, 19)),
    "everything, more keys": Problem(**EVERYTHING, lengths=(7, 19)),
    "everything, more queries": Problem(**EVERYTHING, lengths=(19, 7)),
    "bfloat16": Problem(**EVERYTHING, lengths=(19, 19), dtype=mx.bfloat16),
    "float16": Problem(**EVERYTHING, lengths=(19, 19), dtype=mx.float16),
}


def numpy64(array):
    return np.array(array.astype(mx.float32), np.float64)


def by_torch(problem, with_probs=False):
    """out, lse, probabilities and the gradients of the inputs in float64: a written-out softmax and autograd."""
    inputs = [torch.tensor(numpy64(array), requires_grad=True) for array in problem.inputs()]
    q, k, v = inputs[:3]
    k, v = (each.repeat_interleave(problem.heads[0] // problem.heads[1], 1) for each in (k, v))
    s = problem.options.scale * torch.einsum("bhtd,bhsd->bhts", q, k)
    if problem.softcap is not None:
        s = problem.softcap * torch.tanh(s / problem.softcap)
    seen = torch.tensor(problem.seen()).expand_as(s)
    s = s.masked_fill(~seen, -math.inf)
    if problem.sinks:
        s = torch.cat([s, inputs[3][:, :, None, None].expand(*s.shape[:3], 1)], -1)
    blind = (s == -math.inf).all(-1, keepdim=True)
    # NaN, as a softmax of nothing is, does not come back out of a choice's gradient.
    s = s.masked_fill(blind, 0.0)
    lse = torch.logsumexp(s, -1).masked_fill(blind[..., 0], -math.inf)
    p = torch.softmax(s, -1).masked_fill(blind, 0.0)[..., : problem.lengths[1]]
    results = [p @ v, lse, p][: 2 + with_probs]
    loss = sum(
        (result.masked_fill(result == -math.inf, 0.0) * torch.tensor(numpy64(cotangent))).sum()
        for result, cotangent in zip(results, problem.cotangents(with_probs), strict=True)
    )
    loss.backward()
    zeros = [torch.zeros_like(each) if each.grad is None else each.grad for each in inputs]
    return [each.detach().numpy() for each in (*results, *zeros)]


def assert_near(got, want, rtol):
    """Raise unless arrays agree within a part of the largest element, and -inf stands where it has to."""
    for index, (array, truth) in enumerate(zip(got, want, strict=True)):
        array = numpy64(array)
        assert array.shape == truth.shape, index
        infinite = truth == -math.inf
        assert ((array == -math.inf) == infinite).all(), index
        error = np.abs(array[~infinite] - truth[~infinite]).max(initial=0)
        assert error <= rtol * np.abs(truth[~infinite]).max(initial=0), (index, error)
