"""Where a checkpoint has a mixture of experts: each expert's matrices by themselves, or stacked as mlx-lm has them."""

from collections.abc import Iterable, Iterator, Mapping
import re

from forge_mlx.hub.families.layout import Layout, Piece, same, split_name
import mlx.core as mx


class ExpertLayout(Layout):
    """As `Layout`, with the experts of a block side by side: each a matrix of its own, or stacked as mlx-lm has them.

    Args:
        block: What a checkpoint calls the feed-forward layer of experts.
        matrices: Our names of an expert's matrices -> those of each expert by itself.
        stacked: What mlx-lm calls stacked experts.
    """

    def __init__(
        self, block: str = "mlp", *, matrices: Mapping[str, str] | None = None, stacked: str = "switch_mlp"
    ) -> None:
        super().__init__()
        self._block, self._matrices, self._stacked = block, dict(matrices or {}), stacked

    def place(self, module: str) -> str:
        """What a checkpoint calls a module, without what stands before it; of experts, the stacked one's.

        Args:
            module: Our dotted name.
        """
        if module.endswith(".mlp.router"):
            return module.replace(".mlp.router", f".{self._block}.gate")
        return module.replace(".mlp.experts.", f".{self._block}.{self._stacked}.")

    def pieces(self, name: str, names: Iterable[str]) -> list[Piece]:
        """The ways in which a checkpoint may hold one of our arrays, the likeliest last.

        Args:
            name: Our dotted name of the array.
            names: All names of the checkpoint, without what stands before them.
        """
        if name.endswith(".mlp.router.selection_bias"):
            gate = self.place(name.removesuffix(".selection_bias"))
            return [Piece((f"{gate}.e_score_correction_bias",), same)]
        found = super().pieces(name, names)
        if ".mlp.experts." not in name:
            return found
        block, matrix, part = self._expert(name)
        numbered = re.compile(rf"{re.escape(block)}\.experts\.(\d+)\.{matrix}\.{part}")
        numbers = sorted(int(match[1]) for match in map(numbered.fullmatch, names) if match)
        count = numbers[-1] + 1 if numbers else 1
        each = tuple(f"{block}.experts.{expert}.{matrix}.{part}" for expert in range(count))
        return [*found, Piece(each, mx.stack)]

    def written(self, arrays: Mapping[str, mx.array], *, coded: bool) -> Iterator[tuple[str, mx.array]]:
        """Each tensor of the checkpoint of a model, with its name.

        An expert is a matrix of its own, as in Hugging Face's checkpoints, which mlx-lm stacks when it loads them. With
        codes they stay stacked, as mlx-lm writes them, since it does not stack them for each family.

        Args:
            arrays: Our arrays by their names.
            coded: Whether layers hold codes.
        """
        for name, array in arrays.items():
            if name.endswith(".mlp.router.selection_bias"):
                yield f"model.{self.pieces(name, ())[0].names[0]}", array
            elif coded or ".mlp.experts." not in name:
                yield from super().written({name: array}, coded=coded)
            else:
                block, matrix, part = self._expert(name)
                for expert in range(array.shape[0]):
                    yield f"model.{block}.experts.{expert}.{matrix}.{part}", array[expert]

    def _expert(self, name: str) -> tuple[str, str, str]:
        """Block, matrix and part of an array of experts: "layers.0.mlp", "w1", "weight"."""
        before, after = name.split(".mlp.experts.")
        matrix, part = split_name(after)
        return f"{before}.{self._block}", self._matrices.get(matrix, matrix), part
