"""What a case of each op of attention is: its arrays, and what is expected of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
import math
from typing import Any, ClassVar, Final, Literal

from forge_mlx.kernels._common.cases import OpCase, laid_out, random_values
from forge_mlx.kernels._common.proof import to_float64
from forge_mlx.kernels.attention import float64, ideal, reference
from forge_mlx.kernels.attention.attention_op import attention
from forge_mlx.kernels.attention.backward_op import flash_attention_backward
from forge_mlx.kernels.attention.op import flash_attention
from forge_mlx.kernels.attention.options import Options
from forge_mlx.metal.dtypes import dtype_name
import mlx.core as mx
import numpy as np

Results = tuple[mx.array, ...]


@dataclass(frozen=True)
class FlashCase(OpCase):
    """flash_attention with its gradients.

    Attributes:
        batch: B.
        heads: H.
        kv_heads: Hkv.
        queries: T.
        keys: S.
        head_dim: D.
        v_head_dim: Dv; None: D.
        dtype: Of q, k and v.
        causal: As the op takes it.
        window: As the op takes it.
        softcap: As the op takes it.
        scale: As the op takes it.
        segments: None, or a kind of ids: "sorted" documents of random lengths, "unsorted", "padding" behind documents,
            "all padding" in the last row of the batch, "one token" in each document, "pair" of unlike documents for
            queries and keys, or "documents-64" for documents of that length.
        sinks: Whether there are sinks.
        with_lse: Whether lse is returned and has a cotangent.
        values: What q, k and v hold, as `random_values` takes it, or "capped": scores near 1e4.
        layout: As `laid_out` takes it, or "heads": `[B, T, H, D]` in memory.
        variant: As the op takes it.
    """

    op: ClassVar[str] = "flash_attention"

    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    queries: int = 33
    keys: int = 33
    head_dim: int = 16
    v_head_dim: int | None = None
    dtype: mx.Dtype = mx.float32
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    segments: str | None = None
    sinks: bool = False
    with_lse: bool = False
    values: str = "normal"
    layout: str = "contiguous"
    variant: Literal["auto", "scalar", "mma"] = "auto"

    @property
    def name(self) -> str:
        """A readable id."""
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}of{self.kv_heads}"
        length = f"{self.queries}" if self.queries == self.keys else f"{self.queries}to{self.keys}"
        size = f"{self.head_dim}" if self.v_size == self.head_dim else f"{self.head_dim}v{self.v_size}"
        parts = [f"{self.batch}x{heads}x{length}x{size}", dtype_name(self.dtype)]
        parts += [] if self.causal else ["full"]
        parts += [f"{name}{value:g}" for name in ("window", "softcap", "scale") if (value := getattr(self, name))]
        parts += [] if self.segments is None else [self.segments.replace(" ", "-")]
        parts += [word for word, wanted in (("sinks", self.sinks), ("lse", self.with_lse)) if wanted]
        return "-".join([*parts, *(each for each in (self.values, self.layout, self.variant) if each not in _USUAL)])

    @property
    def v_size(self) -> int:
        """The head size of v."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def options(self) -> Options:
        """The options as the room hands them on."""
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return Options(scale, self.causal, self.window, self.softcap)

    def inputs(self) -> dict[str, mx.array]:
        """q, k, v and, where the case has them, sinks."""
        random = np.random.default_rng(len(self.name))
        shapes = {
            "q": (self.batch, self.heads, self.queries, self.head_dim),
            "k": (self.batch, self.kv_heads, self.keys, self.head_dim),
            "v": (self.batch, self.kv_heads, self.keys, self.v_size),
        }
        # Products of two numbers near 100, and as many of each sign.
        kinds = (
            {"q": "100", "k": "100", "v": "normal"} if self.values == "capped" else dict.fromkeys("qkv", self.values)
        )
        arrays = {name: self._array(random_values(shapes[name], kinds[name], random)) for name in shapes}
        if self.sinks:
            arrays["sinks"] = mx.array(random.normal(4, 2, size=self.heads).astype(np.float32))
        return arrays

    def cotangents(self) -> dict[str, mx.array]:
        """That of out and, where it is returned, of lse."""
        random = np.random.default_rng(1000 + len(self.name))
        rows = (self.batch, self.heads, self.queries)
        out = self._array(random.normal(size=(*rows, self.v_size)).astype(np.float32))
        if not self.with_lse:
            return {"out": out}
        return {"out": out, "lse": mx.array(random.normal(size=rows).astype(np.float32))}

    def constants(self) -> dict[str, mx.array]:
        """The segment ids of queries and keys."""
        return {name: mx.array(ids) for name, ids in zip(("q_segments", "k_segments"), self._segments(), strict=False)}

    def function(self, impl: str) -> Callable[..., mx.array | Results]:
        """flash_attention of the inputs on an engine; "mlx": mx.fast's, or plain operations for what that cannot do."""
        ids = self._ids()
        is_pair = self.queries != self.keys or self.segments == "pair"
        given = ids if ids is None or is_pair else ids[0]

        def call(q: mx.array, k: mx.array, v: mx.array, sinks: mx.array | None = None) -> mx.array | Results:
            if impl == "mlx":
                return self._by_mlx(q, k, v, sinks)
            return flash_attention(
                q,
                k,
                v,
                segment_ids=given,
                sinks=sinks,
                return_lse=self.with_lse,
                variant=self.variant,
                impl=impl,
                **self._settings,
            )

        return call

    def run(self, impl: str) -> dict[str, mx.array]:
        """As every case's, except that lse is 0 where it is -inf, and "is_seeing" says where it is not."""
        return finite(super().run(impl))

    def formula(self, inputs: Mapping[str, mx.array], cotangents: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The results and gradients by reference.py."""
        q, k, v = (inputs[name] for name in "qkv")
        sinks = mx.broadcast_to(inputs["sinks"], q.shape[:2]) if self.sinks else None
        q_ids, k_ids = self._ids() or (None, None)
        out, lse = reference.forward(q, k, v, q_ids, k_ids, sinks, self.options)
        dlse = cotangents.get("lse", mx.zeros_like(lse))
        gradients = reference.backward(q, k, v, q_ids, k_ids, sinks, out, lse, cotangents["out"], dlse, self.options)
        results = {"out": out} | ({"lse": lse} if self.with_lse else {})
        for name, gradient in zip(inputs, gradients, strict=True):
            results[f"d{name}"] = gradient.sum(0) if name == "sinks" else gradient
        return results

    def expected(self) -> Mapping[str, np.ndarray]:
        """The results and gradients by NumPy, of the inputs as the dtype has rounded them."""
        return self.expected_of(None)

    def expected_of(self, out: np.ndarray | None) -> dict[str, np.ndarray]:
        """What is expected where the gradients are made with this `out`, as a dtype has rounded it.

        Args:
            out: `[B, H, T, Dv]`; None: the exact one.
        """
        inputs = {name: to_float64(array) for name, array in self.inputs().items()}
        cotangents = {name: to_float64(array) for name, array in self.cotangents().items()}
        results = float64.attention(inputs, cotangents, self.options, self.seen(), out)
        lse = results["lse"]
        results |= {"lse": np.where(lse == -np.inf, 0, lse), "is_seeing": lse != -np.inf}
        hidden = {"probs"} if self.with_lse else {"probs", "lse", "is_seeing"}
        return {name: each for name, each in results.items() if name not in hidden - cotangents.keys()}

    def seen(self) -> np.ndarray:
        """`[B or 1, 1, T, S]`: which keys a query sees."""
        return float64.visible(self.queries, self.keys, self.options, *self._segments())

    def ideal_bytes(self) -> dict[str, int]:
        """Own rows once a block, the other side's once for each pair of blocks that see each other."""
        of_kernels = ideal.device_bytes(self)
        return {"forward": of_kernels.pop("forward"), "backward": sum(of_kernels.values())}

    @property
    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("scale", "causal", "window", "softcap")}

    def _array(self, values: np.ndarray) -> mx.array:
        """The values in the case's dtype and layout."""
        x = mx.array(values).astype(self.dtype)
        if self.layout == "heads":
            return mx.contiguous(x.swapaxes(1, 2)).swapaxes(1, 2)
        return laid_out(x, self.layout)

    def _ids(self) -> tuple[mx.array, mx.array] | None:
        """The constants, if there are any."""
        ids = self.constants()
        return (ids["q_segments"], ids["k_segments"]) if ids else None

    def _segments(self) -> tuple[np.ndarray, ...]:
        """int32 `[B, T]` and `[B, S]`, or nothing. The last query and the last key are the same token."""
        if self.segments is None:
            return ()
        random = np.random.default_rng(len(self.name) + 2)
        length = max(self.queries, self.keys)
        ids = np.stack(
            [segment_ids(self.segments, length, random) for _ in range(self.batch)] or [np.empty((0, length))]
        )
        others = np.sort(random.integers(0, 3, ids.shape)) if self.segments == "pair" else ids
        if self.segments == "all padding":
            ids[-1:] = -1 - np.arange(length) % 2
        return ids[:, length - self.queries :].astype(np.int32), others[:, length - self.keys :].astype(np.int32)

    def _by_mlx(self, q: mx.array, k: mx.array, v: mx.array, sinks: mx.array | None) -> mx.array | Results:
        """MLX's own op with a mask of T x S; for softcap and lse, which it has not, plain operations."""
        seen = mx.array(self.seen())
        options = self.options
        if self.softcap is None and not self.with_lse:
            is_plain = self.causal and self.window is None and self.segments is None
            mask = "causal" if is_plain else None if seen.all().item() else seen
            return mx.fast.scaled_dot_product_attention(q, k, v, scale=options.scale, mask=mask, sinks=sinks)
        of_batches = None if sinks is None else mx.broadcast_to(sinks, q.shape[:2])
        out, lse = reference.attend(reference.scores(q, k, options), v, seen, of_batches)
        return (out.astype(q.dtype), lse) if self.with_lse else out.astype(q.dtype)


_USUAL: Final = ("normal", "contiguous", "auto")


def finite(results: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The results with lse 0 where it is -inf, and with "is_seeing" for where it is not.

    Args:
        results: By name, with or without "lse".
    """
    if "lse" not in results:
        return dict(results)
    is_seeing = results["lse"] != -math.inf
    return {**results, "lse": mx.where(is_seeing, results["lse"], 0.0), "is_seeing": is_seeing}


def segment_ids(kind: str, length: int, random: np.random.Generator) -> np.ndarray:
    """Ids for one row of tokens.

    Args:
        kind: As `FlashCase.segments` has it.
        length: Tokens.
        random: Where lengths of documents come from.
    """
    places = np.arange(length)
    if kind == "one token":
        return places
    if kind == "unsorted":
        return random.permutation(places % 3)
    if kind.startswith("documents-"):
        return places // int(kind.removeprefix("documents-"))
    # Ids that are not in a row, and documents of 12 tokens in the mean.
    ids = 5 + 2 * np.cumsum(random.uniform(size=length) < 1 / 12)
    if kind == "padding":
        ids[length - length // 3 :] = -1
    return ids


@dataclass(frozen=True)
class FlashBackwardCase(FlashCase):
    """flash_attention_backward. It has no gradient: its cases have no cotangents.

    Attributes:
        from_maximum: Whether a row maximum and a row sum are given in place of lse.
    """

    op: ClassVar[str] = "flash_attention_backward"

    from_maximum: bool = False

    @property
    def name(self) -> str:
        """A readable id."""
        return f"{super().name}-from-maximum" if self.from_maximum else super().name

    def inputs(self) -> dict[str, mx.array]:
        """q, k, v, perhaps sinks, out, dout, lse or the row's maximum and sum, and perhaps dlse."""
        inputs, cotangents = super().inputs(), super().cotangents()
        arrays = {name: to_float64(array) for name, array in inputs.items()}
        found = float64.attention(arrays, {"out": to_float64(cotangents["out"])}, self.options, self.seen())
        inputs |= {"out": self._array(found["out"].astype(np.float32)), "dout": cotangents["out"]}
        lse = found["lse"]
        if self.from_maximum:
            # Any number does for the maximum; that of another block is a usual one.
            inputs["row_max"] = mx.array(np.where(lse == -np.inf, lse, lse - 0.75).astype(np.float32))
            inputs["row_sum"] = mx.array(np.where(lse == -np.inf, 0, np.exp(0.75)).astype(np.float32))
        else:
            inputs["lse"] = mx.array(lse.astype(np.float32))
        return inputs | ({"dlse": cotangents["lse"]} if self.with_lse else {})

    def cotangents(self) -> dict[str, mx.array]:
        """None: there is no gradient."""
        return {}

    def function(self, impl: str) -> Callable[..., Results]:
        """flash_attention_backward of the inputs on an engine; "mlx": the gradient of MLX's own op."""
        ids, names = self._ids(), list(self.inputs())

        def call(*arrays: mx.array) -> Results:
            named: dict[str, Any] = dict(zip(names, arrays, strict=True))
            if impl == "mlx":
                given = [named["dout"], *([named["dlse"]] if self.with_lse else [])]
                primals = [named[name] for name in ("q", "k", "v", "sinks") if name in named]
                return tuple(mx.vjp(FlashCase.function(self, "mlx"), primals, given)[1])
            return flash_attention_backward(
                **named,
                segment_ids=ids,
                variant=self.variant,
                impl=impl,
                **self._settings,
            )

        return call

    def run(self, impl: str) -> dict[str, mx.array]:
        """The gradients by name on an engine; "formula": by reference.py."""
        if impl == "formula":
            return self.formula(self.inputs(), {})
        return self._named(self.function(impl)(*self.inputs().values()))

    def formula(self, inputs: Mapping[str, mx.array], _cotangents: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The gradients by reference.py."""
        q, k, v, out, dout = (inputs[name] for name in ("q", "k", "v", "out", "dout"))
        sinks = mx.broadcast_to(inputs["sinks"], q.shape[:2]) if self.sinks else None
        q_ids, k_ids = self._ids() or (None, None)
        lse = inputs["row_max"] + mx.log(inputs["row_sum"]) if self.from_maximum else inputs["lse"]
        dlse = inputs.get("dlse", mx.zeros_like(lse))
        found = reference.backward(q, k, v, q_ids, k_ids, sinks, out, lse, dout, dlse, self.options)
        return self._named((*found[:3], *(each.sum(0) for each in found[3:])))

    def expected(self) -> Mapping[str, np.ndarray]:
        """The gradients by NumPy, of the out that is given."""
        inputs = {name: to_float64(array) for name, array in self.inputs().items()}
        cotangents = {"out": inputs["dout"], **({"lse": inputs["dlse"]} if self.with_lse else {})}
        results = float64.attention(inputs, cotangents, self.options, self.seen(), inputs["out"])
        return {name: each for name, each in results.items() if name not in ("out", "lse", "probs")}

    def ideal_bytes(self) -> dict[str, int]:
        """Those of the backward pass."""
        return {"forward": super().ideal_bytes()["backward"], "backward": 0}

    def _named(self, gradients: Results) -> dict[str, mx.array]:
        return dict(zip(("dq", "dk", "dv", "dsinks"), gradients, strict=False))


@dataclass(frozen=True)
class AttentionCase(FlashCase):
    """attention, which returns the probabilities, with its gradients.

    Attributes:
        with_probs: Whether the probabilities are returned and have a cotangent.
    """

    op: ClassVar[str] = "attention"

    with_probs: bool = True

    @property
    def name(self) -> str:
        """A readable id."""
        return f"unfused-{super().name}{'-probs' if self.with_probs else ''}"

    def cotangents(self) -> dict[str, mx.array]:
        """Those of the results, out first and the probabilities last."""
        if not self.with_probs:
            return super().cotangents()
        random = np.random.default_rng(2000 + len(self.name))
        shape = (self.batch, self.heads, self.queries, self.keys)
        probs = mx.array(random.normal(size=shape).astype(np.float32)).astype(self.dtype)
        return {**super().cotangents(), "probs": probs}

    def function(self, impl: str) -> Callable[..., mx.array | Results]:
        """attention of the inputs: plain operations, whatever the engine; "mlx": the formula."""
        ids = self._ids()

        def call(q: mx.array, k: mx.array, v: mx.array, sinks: mx.array | None = None) -> mx.array | Results:
            if impl == "mlx":
                found = self._forward(q, k, v, sinks)
                return tuple(found[name] for name in self.cotangents())
            return attention(
                q,
                k,
                v,
                segment_ids=ids,
                sinks=sinks,
                return_lse=self.with_lse,
                return_probs=self.with_probs,
                impl="reference",
                **self._settings,
            )

        return call

    def formula(self, inputs: Mapping[str, mx.array], cotangents: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The results by reference.py, the gradients by MLX from those."""

        def call(*arrays: mx.array) -> Results:
            found = self._forward(*arrays)
            return tuple(found[name] for name in cotangents)

        results, gradients = mx.vjp(call, list(inputs.values()), list(cotangents.values()))
        named = dict(zip(cotangents, results, strict=True))
        return named | {f"d{name}": gradient for name, gradient in zip(inputs, gradients, strict=True)}

    def _forward(self, q: mx.array, k: mx.array, v: mx.array, sinks: mx.array | None = None) -> dict[str, mx.array]:
        """out, lse and the probabilities by reference.py."""
        seen, s = mx.array(self.seen()), reference.scores(q, k, self.options)
        of_batches = None if sinks is None else mx.broadcast_to(sinks, q.shape[:2])
        out, lse = reference.attend(s, v, seen, of_batches)
        probs = reference.probabilities(s, seen, lse)
        return {"out": out.astype(q.dtype), "lse": lse, "probs": probs.astype(q.dtype)}
