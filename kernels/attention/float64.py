"""Attention and its gradients in float64 by NumPy, every step written out: the oracle of the room's cases."""

from collections.abc import Mapping

from forge_mlx.kernels.attention.options import Options
import numpy as np

Array = np.ndarray


def visible(
    queries: int, keys: int, options: Options, q_segments: Array | None = None, k_segments: Array | None = None
) -> Array:
    """`[B or 1, 1, T, S]`: which keys a query sees.

    Args:
        queries: Their number T.
        keys: Their number S.
        options: The causal order and the window.
        q_segments: `[B, T]` or None.
        k_segments: `[B, S]` or None.
    """
    # Where the last query stands above the last key, the one that both have in common.
    ahead = np.arange(keys) - (np.arange(queries)[:, None] + keys - queries)
    seen = np.ones((1, 1, queries, keys), bool)
    if options.causal:
        seen &= ahead <= 0
    if options.window is not None:
        seen &= ahead > -options.window
    if q_segments is not None and k_segments is not None:
        mine, other = q_segments[:, None, :, None], k_segments[:, None, None, :]
        seen = seen & (mine == other) & (mine >= 0)
    return seen


def attention(
    arrays: Mapping[str, Array],
    cotangents: Mapping[str, Array],
    options: Options,
    seen: Array,
    rounded: Array | None = None,
) -> dict[str, Array]:
    """out, lse, the probabilities P and the gradients of what `arrays` holds.

    Args:
        arrays: "q" `[B, H, T, D]`, "k" `[B, Hkv, S, D]`, "v" `[B, Hkv, S, Dv]` and, perhaps, "sinks" `[H]`.
        cotangents: "out" `[B, H, T, Dv]` and, perhaps, "lse" `[B, H, T]` and "probs" `[B, H, T, S]`.
        options: Scale and softcap.
        seen: What `visible` returns.
        rounded: The out that D = rowsum(dout out) is made of, as a dtype has rounded it; None: D = rowsum(dP P).
    """
    q, (k, v) = arrays["q"], (_for_each_head(arrays[name], arrays["q"]) for name in "kv")
    sinks = arrays["sinks"][None, :, None] if "sinks" in arrays else np.full((1, 1, 1), -np.inf)
    scores, slope = options.scale * q @ k.swapaxes(-1, -2), 1.0
    if options.softcap is not None:
        bent = np.tanh(scores / options.softcap)
        scores, slope = options.softcap * bent, 1 - bent**2
    scores = np.where(seen, scores, -np.inf)
    top = np.maximum(scores.max(axis=-1, initial=-np.inf), sinks)
    top = np.where(top == -np.inf, 0.0, top)
    total = np.exp(scores - top[..., None]).sum(-1) + np.exp(sinks - top)
    # Rows that see nothing have a total of 0, and probabilities of 0.
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    p = np.exp(scores - np.where(total == 0, 0.0, lse)[..., None])
    out = p @ v
    dout = cotangents["out"]
    dp = dout @ v.swapaxes(-1, -2) + cotangents.get("probs", np.float64(0))
    delta = (dp * p).sum(-1) if rounded is None else (dout * rounded).sum(-1)
    delta = delta - cotangents.get("lse", np.float64(0))
    ds = p * (dp - delta[..., None]) * slope * options.scale
    kv_heads = arrays["k"].shape[1]
    results = {
        "out": out,
        "lse": lse,
        "probs": p,
        "dq": ds @ k,
        "dk": _sum_of_groups(ds.swapaxes(-1, -2) @ q, kv_heads),
        "dv": _sum_of_groups(p.swapaxes(-1, -2) @ dout, kv_heads),
    }
    if "sinks" in arrays:
        results["dsinks"] = -(np.exp(sinks - lse) * delta).sum((0, 2))
    return results


def _for_each_head(array: Array, q: Array) -> Array:
    """`[B, Hkv, S, D]` -> `[B, H, S, D]`."""
    return np.repeat(array, q.shape[1] // max(1, array.shape[1]), axis=1)


def _sum_of_groups(array: Array, kv_heads: int) -> Array:
    """`[B, H, S, D]` -> `[B, Hkv, S, D]`."""
    batch, heads, *rest = array.shape
    total: Array = array.reshape(batch, kv_heads, heads // max(1, kv_heads), *rest).sum(2)
    return total
