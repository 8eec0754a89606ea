"""Where a checkpoint has latent attention: kv_b_proj as one matrix, or cut in two for each head as mlx-lm has it."""

from collections.abc import Iterable
from typing import Final

from forge_mlx.hub.families.expert_layout import ExpertLayout
from forge_mlx.hub.families.layout import Piece
import mlx.core as mx

OF_KEYS: Final = "embed_q"
"""mlx-lm's name of what makes keys of latents, `[H, rank, qk_nope_head_dim]`."""
OF_VALUES: Final = "unembed_out"
"""mlx-lm's name of what makes values of latents, `[H, v_head_dim, rank]`."""
_WHOLE: Final = "kv_b_proj.weight"


class LatentLayout(ExpertLayout):
    """As `ExpertLayout`, with kv_b_proj whole or as mlx-lm cuts it; it is written whole, which mlx-lm cuts."""

    def pieces(self, name: str, names: Iterable[str]) -> list[Piece]:
        """The ways in which a checkpoint may hold one of our arrays, the likeliest last.

        Args:
            name: Our dotted name of the array.
            names: All names of the checkpoint, without what stands before them.
        """
        found = super().pieces(name, names)
        if not name.endswith(f".{_WHOLE}"):
            return found
        attention = name.removesuffix(_WHOLE)
        return [Piece((f"{attention}{OF_KEYS}.weight", f"{attention}{OF_VALUES}.weight"), _joined), *found]


def _joined(tensors: list[mx.array]) -> mx.array:
    """`[H * (qk_nope_head_dim + v_head_dim), rank]`: for each head what makes its keys, then what makes its values."""
    of_keys, of_values = tensors
    whole = mx.concatenate([of_keys.swapaxes(1, 2), of_values], axis=1)
    return whole.reshape(-1, whole.shape[2])
