"""Where a checkpoint has a GPT-2: with names of its own, matrices turned, and q, k and v as one."""

from collections.abc import Iterable, Iterator, Mapping
import re
from typing import Final

from forge_mlx.hub.errors import HubError
from forge_mlx.hub.families.layout import Layout, Piece, split_name
import mlx.core as mx

_PLACES_OF_GPT2: Final = {
    "embed_tokens": "wte",
    "embed_positions": "wpe",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
    "norm": "ln_f",
}
_TURNED: Final = re.compile(r"h\.\d+\.(attn|mlp)\.c_\w+\.weight")
_QKV: Final = ("q_proj", "k_proj", "v_proj")


class GPT2Layout(Layout):
    """GPT-2's names: matrices turned, q, k and v as one; mlx-lm's own checkpoints have them one, but not turned."""

    def __init__(self) -> None:
        super().__init__(prefixes=("transformer.", "model."))

    def upright(self, name: str, array: mx.array) -> mx.array:
        """A tensor with the axes that ours have.

        Args:
            name: As the checkpoint has it.
            array: Likewise.
        """
        is_turned = _TURNED.fullmatch(self.bare(name)) is not None and not name.startswith("model.")
        return array.T if is_turned else array

    def place(self, module: str) -> str:
        """What a checkpoint calls a module, without what stands before it; of q, k and v, the one for all of them.

        Args:
            module: Our dotted name.
        """
        match = re.fullmatch(r"layers\.(\d+)\.(.*)", module)
        if match is None:
            return _PLACES_OF_GPT2.get(module, module)
        number, inside = match.groups()
        if inside.removeprefix("self_attn.") in _QKV:
            return f"h.{number}.attn.c_attn"
        return f"h.{number}.{_PLACES_OF_GPT2.get(inside, inside)}"

    def pieces(self, name: str, names: Iterable[str]) -> list[Piece]:
        """The ways in which a checkpoint may hold one of our arrays, the likeliest last.

        Args:
            name: Our dotted name of the array.
            names: All names of the checkpoint, without what stands before them.
        """
        del names
        module, part = split_name(name)
        matrix = module.rpartition(".")[2]
        index = _QKV.index(matrix) if matrix in _QKV else None

        def make(tensors: list[mx.array]) -> mx.array:
            return tensors[0] if index is None else mx.split(tensors[0], len(_QKV))[index]

        return [Piece((f"{self.place(module)}.{part}",), make)]

    def written(self, arrays: Mapping[str, mx.array], *, coded: bool) -> Iterator[tuple[str, mx.array]]:
        """Each tensor of the checkpoint of a model, with its name.

        Args:
            arrays: Our arrays by their names.
            coded: Whether layers hold codes.

        Raises:
            HubError: q, k and v of a block have not one format, so that they cannot be one matrix.
        """
        for name, array in arrays.items():
            module, part = split_name(name)
            if module.endswith(_QKV[1:]):
                continue
            if module.endswith(_QKV[0]):
                parts = [arrays.get(f"{module.removesuffix(_QKV[0])}{each}.{part}") for each in _QKV]
                array = self._joined(module, [each for each in parts if each is not None])
            written = f"{self.module(module, coded=coded)}.{part}"
            yield written, array.T if _TURNED.fullmatch(written) else array

    def module(self, module: str, *, coded: bool) -> str:
        """What a checkpoint calls a module, whole.

        Args:
            module: Our dotted name.
            coded: As in `written`.
        """
        place = self.place(module)
        # mlx-lm adds the prefix to what it turns, and turns nothing that has it.
        return f"model.{place}" if coded and not place.startswith("lm_head") else place

    def _joined(self, module: str, parts: list[mx.array]) -> mx.array:
        if len(parts) < len(_QKV) or len({(each.dtype, each.shape[1:]) for each in parts}) > 1:
            raise HubError(
                f"[save_pretrained] q_proj, k_proj and v_proj must be of one format in a gpt2 but those of "
                f"{module.rpartition('.')[0]} are not. Quantise them alike."
            )
        return mx.concatenate(parts)
