"""How batches of matrices are gone through: neighbouring axes become one, and some become rows or depth."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

Batch = tuple[int, ...]

_MOST_KEPT: Final = 2
_MOST_SUMMED: Final = 1


@dataclass(frozen=True)
class Group:
    """Neighbouring batch axes that all operands treat alike.

    Attributes:
        size: Their sizes multiplied.
        in_a: Whether a has them; an operand that has not is repeated.
        in_b: Whether b has them.
        in_c: Whether c has them.
        is_kept: Whether y has them; what y has not is summed over.
    """

    size: int
    in_a: bool
    in_b: bool
    in_c: bool
    is_kept: bool


@dataclass(frozen=True)
class Plan:
    """One launch: y[i] = sum over j of op(a)[i, j] op(b)[i, j] + c[i], i over batches and j over summed batches.

    Attributes:
        rows: Rows M of op(a) and y.
        columns: Columns N of op(b) and y.
        depth: Columns K of op(a), rows of op(b).
        c_rows: Rows of c: M, or 1 for a row that is added to all.
        groups: The batch axes, outermost first.
    """

    rows: int
    columns: int
    depth: int
    c_rows: int
    groups: tuple[Group, ...]

    @property
    def kept(self) -> tuple[Group, ...]:
        """The batch axes of y, at most two: outer and inner."""
        return tuple(group for group in self.groups if group.is_kept)

    @property
    def summed(self) -> tuple[Group, ...]:
        """The batch axes that are summed over, at most one."""
        return tuple(group for group in self.groups if not group.is_kept)

    def strides(self, operand: str) -> list[int]:
        """Elements from one matrix of a, b or c to the next along the outer, the inner and the summed axis.

        Args:
            operand: "a", "b" or "c".
        """
        stride = {"a": self.rows * self.depth, "b": self.depth * self.columns, "c": self.c_rows * self.columns}[operand]
        kept: list[int] = []
        summed: list[int] = []
        for group in reversed(self.groups):
            has_it = getattr(group, f"in_{operand}")
            (kept if group.is_kept else summed).insert(0, stride if has_it else 0)
            stride *= group.size if has_it else 1
        return [0] * (_MOST_KEPT - len(kept)) + kept + (summed or [0])


def plan(
    batches: Sequence[Batch | None],
    batch: Batch,
    sizes: tuple[int, int, int],
    c_rows: int,
    transpose_a: bool,
    transpose_b: bool,
) -> Plan | None:
    """Go through batches in as few steps as their axes allow.

    Args:
        batches: The batch axes of a, b and c, as many for each; 1 for an axis along which one is repeated. None for
            no c.
        batch: Those of y; 1 for an axis that is summed over.
        sizes: Rows, columns and depth of one product.
        c_rows: Rows of c, as many as y or 1.
        transpose_a: Whether a lies as `[K, M]`.
        transpose_b: Whether b lies as `[N, K]`.

    Returns:
        The plan; None where the axes alternate so often that one of the arrays must be laid out anew.
    """
    groups: list[Group] = []
    shapes = [each or (1,) * len(batch) for each in (*batches, batch)]
    for axis in zip(*shapes, strict=True):
        if (size := max(axis)) == 1:
            continue
        group = Group(size, *(each != 1 for each in axis))
        if groups and replace(groups[-1], size=size) == group:
            group = replace(group, size=size * groups.pop().size)
        groups.append(group)
    rows, columns, depth = sizes
    has_c = batches[2] is not None
    while groups:
        inner = groups[-1]
        if not inner.is_kept and inner.in_a and inner.in_b and transpose_a and not transpose_b:
            depth *= inner.size
        elif inner.is_kept and inner.in_a and not inner.in_b and not transpose_a:
            if has_c and c_rows != (rows if inner.in_c else 1):
                break
            c_rows *= inner.size if inner.in_c else 1
            rows *= inner.size
        else:
            break
        groups.pop()
    found = Plan(rows, columns, depth, c_rows, tuple(groups))
    return found if len(found.kept) <= _MOST_KEPT and len(found.summed) <= _MOST_SUMMED else None
