"""A heat map over the steps of a run, drawn as a small picture inside the page."""

import base64
from dataclasses import dataclass
from itertools import pairwise
import struct
from typing import Any
import zlib

from forge_mlx.train.charts import Floats, index_ticks, step_ticks
import numpy as np
from numpy.typing import NDArray

# Colours on either side of a ratio of 1, deeper toward 0 and toward infinity; pixels of 1 show the page through.
FULL, EMPTY, UNKNOWN = (0xD1, 0x46, 0x0B), (0x1F, 0x5F, 0xD0), (0x80, 0x80, 0x80)
# Shades of each colour: more would add nothing that is seen and much to a noisy picture's size.
SHADES = 32
_LEGEND = ((0.0, "0"), (0.25, "¼"), (0.5, "½"), (1.0, "1"), (2.0, "2"), (4.0, "4"), (16.0, "16"))


@dataclass
class HeatMap:
    """What the rows got of a total in each window of steps, relative to the rows' mean.

    Attributes:
        title: What is drawn.
        starts: Step before each window's first, float64 `[N]`, ascending.
        steps: Each window's last step, float64 `[N]`.
        amounts: float64 `[N, R]`, a window's amount of each row. NaN anywhere in a window: it is not known.
    """

    title: str
    starts: Floats
    steps: Floats
    amounts: Floats

    def ratios(self, last_step: int, columns: int) -> Floats:
        """``amount / mean over the rows`` in equal stretches of the steps 0 to ``last_step``, `[columns, R]`.

        A window's amount counts in a stretch by the share of its steps that lie there, so that windows of any length
        fit. NaN where no window is known, or nothing came to any row.
        """
        known = np.isfinite(self.amounts).all(axis=1) & (self.steps > self.starts)
        starts, steps, amounts = self.starts[known], self.steps[known], self.amounts[known]
        edges = np.linspace(0.0, last_step, columns + 1)
        sums = np.zeros((columns, self.amounts.shape[1]))
        for column, (low, high) in enumerate(pairwise(edges)):
            first, end = np.searchsorted(steps, low, "right"), np.searchsorted(starts, high, "left")
            length = np.minimum(steps[first:end], high) - np.maximum(starts[first:end], low)
            sums[column] = (length / (steps[first:end] - starts[first:end])) @ amounts[first:end]
        mean = sums.mean(axis=1, keepdims=True)
        ratios: Floats = np.divide(sums, mean, out=np.full_like(sums, np.nan), where=mean > 0)
        return ratios

    def drawn(self, last_step: int, columns: int) -> dict[str, Any]:
        """What the template needs: the picture as base64, ticks in percent, how high it is in pixels.

        Args:
            last_step: The last step of the axis.
            columns: How many stretches of steps at most; no stretch is shorter than the shortest window.
        """
        num_rows = self.amounts.shape[1]
        lengths = (self.steps - self.starts)[self.steps > self.starts]
        columns = max(1, min(columns, round(last_step / float(lengths.min())) if lengths.size else 1))
        ratios = self.ratios(last_step, columns)
        return {
            "title": self.title,
            "picture": base64.b64encode(png(shades(ratios).T)).decode("ascii"),
            "hover": {"last": last_step, "columns": columns, "rows": num_rows},
            "height": min(max(8 * num_rows, 96), max(176, num_rows // 2)),
            "x_ticks": step_ticks(last_step),
            "y_ticks": index_ticks(num_rows),
            "steps_a_column": last_step / columns,
            "unknown": bool(np.isnan(ratios).any()),
        }


def position(ratio: Floats) -> Floats:
    """``(ratio - 1) / (ratio + 1)``: 0 to infinity as -1 to 1, a ratio and its inverse equally far from 0."""
    return 1 - 2 / (ratio + 1)


def shades(ratios: Floats) -> NDArray[np.uint8]:
    """Ratios as places in the palette: ``SHADES`` for 1, 0 for 0 alone, ``2 SHADES`` toward infinity, then unknown."""
    places = np.maximum(SHADES + np.rint(SHADES * position(ratios)), ratios > 0)
    return np.where(np.isnan(places), 2 * SHADES + 1, places).astype(np.uint8)


def png(places: NDArray[np.uint8]) -> bytes:
    """Places in the palette, `[height, width]`, as a PNG file with a transparent colour for a ratio of 1."""
    height, width = places.shape
    opacity = [round(255 * abs(shade) / SHADES) for shade in range(-SHADES, SHADES + 1)]
    palette = EMPTY * SHADES + FULL * (SHADES + 1) + UNKNOWN
    # Each row of pixels begins with the number of its filter: none, the best one for a palette.
    rows = np.pad(places, ((0, 0), (1, 0))).tobytes()
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", bytes(palette)),
        (b"tRNS", bytes([*opacity, 0x70])),
        (b"IDAT", zlib.compress(rows, 9)),
        (b"IEND", b""),
    )
    file = b"\x89PNG\r\n\x1a\n"
    for name, data in chunks:
        file += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    return file


def legend() -> dict[str, Any]:
    """What the template needs for the scale: its colours, and its ticks in percent."""
    low, high = ("rgb({} {} {} / {{}}%)".format(*colour) for colour in (EMPTY, FULL))
    ticks = [(50 + 50 * float(position(np.float64(ratio))), text) for ratio, text in _LEGEND]
    return {"colours": [low.format(100), low.format(0), high.format(0), high.format(100)], "ticks": ticks}
