"""The tile table: what a threadgroup of each variant computes. The reasons for the numbers are in README.md."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

Variant = Literal["naive", "tiled", "simdgroup"]
VARIANTS: Final[tuple[Variant, ...]] = get_args(Variant)

LONGEST_ROW: Final = 2**25 - 1
"""Elements in a row of a matrix whose blocks of 64 rows still have offsets of 32 bits."""


@dataclass(frozen=True)
class Tiles:
    """What a threadgroup does.

    Attributes:
        rows: Rows of y that it computes; 0: `columns` counts elements in any rows.
        columns: Columns of y.
        threads: Its threads along x and y.
        step: What the depth of a split is a multiple of.
        split_depth: The least depth of a split.
    """

    rows: int
    columns: int
    threads: tuple[int, int]
    step: int
    split_depth: int


TILES: Final[dict[Variant, Tiles]] = {
    "naive": Tiles(rows=0, columns=256, threads=(256, 1), step=1, split_depth=64),
    "tiled": Tiles(rows=16, columns=16, threads=(16, 16), step=16, split_depth=256),
    "simdgroup": Tiles(rows=64, columns=64, threads=(128, 1), step=16, split_depth=1024),
}

GROUPS: Final = 256
"""Threadgroups that keep a GPU busy: with fewer of them the depth is split."""

SHORT_DEPTH: Final = 8
"""Up to this depth neighbouring threads read from the same cache lines, whichever way a matrix lies."""


def round_up(size: int, step: int) -> int:
    """The next multiple of step."""
    return -(-size // step) * step


def choose(rows: int, columns: int, depth: int, transpose_a: bool, transpose_b: bool) -> Variant:
    """The variant that "auto" takes.

    Args:
        rows: Rows M of the result.
        columns: Columns N of the result.
        depth: Depth K.
        transpose_a: Whether a lies as `[K, M]`.
        transpose_b: Whether b lies as `[N, K]`.
    """
    longest = max(columns, rows if transpose_a else depth, depth if transpose_b else columns)
    if rows >= 64 and columns >= 64 and depth >= 16 and longest <= LONGEST_ROW:
        return "simdgroup"
    tile = TILES["tiled"]
    is_narrow = 2 * rows * columns < round_up(rows, tile.rows) * round_up(columns, tile.columns)
    reads_side_by_side = not transpose_b if rows <= columns else transpose_a
    return "naive" if is_narrow and (reads_side_by_side or depth <= SHORT_DEPTH) else "tiled"


def groups(variant: Variant, rows: int, columns: int) -> tuple[int, int]:
    """Threadgroups along x and y for one matrix.

    Args:
        variant: Which kernel.
        rows: Rows of the result.
        columns: Columns of the result.
    """
    tiles = TILES[variant]
    if not tiles.rows:
        return -(-rows * columns // tiles.columns), 1
    return -(-columns // tiles.columns), -(-rows // tiles.rows)


def split(variant: Variant, planes: int, depth: int) -> tuple[int, int]:
    """In how many parts the depth is summed, and how deep each is; the last may be less deep.

    Args:
        variant: Which kernel.
        planes: Threadgroups without a split, over all batches.
        depth: Depth of the product.

    Returns:
        The number of splits and the depth of each.
    """
    tiles = TILES[variant]
    wanted = max(1, min(GROUPS // planes, depth // tiles.split_depth))
    each = round_up(-(-depth // wanted), tiles.step)
    return -(-depth // each), each
