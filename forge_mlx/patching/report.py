"""What `patch` says about a model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Replaced:
    """Modules of one type that are replaced.

    Attributes:
        kind: The type that they had.
        count: How many.
        by: What runs instead.
    """

    kind: str
    count: int
    by: str


@dataclass(frozen=True)
class Kept:
    """Modules of one type that are left as they are.

    Attributes:
        kind: The type.
        count: How many.
        why: The reason.
    """

    kind: str
    count: int
    why: str


@dataclass(frozen=True)
class PatchReport:
    """What of a model is replaced, and what is not and why. `print` shows it as a table.

    Attributes:
        model: The model's type.
        engine: What runs the kernels, and why.
        replaced: By type, in the order in which the model has them.
        kept: By type, likewise.
        head: How `forge_mlx.patching.loss` computes the loss.
    """

    model: str
    engine: str
    replaced: tuple[Replaced, ...]
    kept: tuple[Kept, ...]
    head: str

    def __str__(self) -> str:
        """The table."""
        kinds = [row.kind for row in self.replaced] + [row.kind for row in self.kept]
        width = max(map(len, kinds))
        counts = len(str(max([row.count for row in self.replaced] + [row.count for row in self.kept])))

        def line(kind: str, count: int, text: str) -> str:
            return f"  {kind:<{width}}  {count:>{counts}}  {text}"

        return "\n".join(
            [
                f"{self.model}, kernels on {self.engine}",
                "replaced:",
                *(line(row.kind, row.count, row.by) for row in self.replaced),
                "not replaced:",
                *(line(row.kind, row.count, row.why) for row in self.kept),
                "with a KV cache (generation) attention is mlx-lm's own",
                f"loss (forge_mlx.patching.loss): {self.head}",
            ]
        )
