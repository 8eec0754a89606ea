"""What a family of models is: the keys of its config.json as fields of our config, and the layout of its tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
import math
from typing import Any, Final

from forge_mlx.hub.errors import HubError
from forge_mlx.hub.families.keys import Keys
from forge_mlx.hub.families.layout import Layout
from forge_mlx.models.decoder_config import DecoderConfig
from forge_mlx.models.gpt import GPTConfig
from forge_mlx.models.moe import MoEConfig
from pydantic import ValidationError

SIZES: Final = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "max_position_embeddings": "max_seq_len",
    "tie_word_embeddings": "tie_embeddings",
    "initializer_range": "init_std",
    "rms_norm_eps": "norm_eps",
}
"""Keys of all families but GPT-2 -> fields."""
HEADS: Final = {"num_key_value_heads": "num_kv_heads", "head_dim": "head_dim"}
"""Keys of families with ordinary attention -> fields."""
SILU: Final = {"hidden_act": ("silu", "swish")}
"""Names of the activation of families with a SwiGLU."""
BIAS: Final[dict[str, tuple[Any, ...]]] = {"attention_bias": (False, True)}
"""What a config.json may say of biases of all projections of attention; our field has more to say."""

_MOST_LAYERS: Final = 10_000
_TRAINING_ONLY: Final = {
    *("dropout", "init_std", "zero_init_residual", "aux_loss_weight", "router_z_loss_weight", "bias_rate"),
}


def _nothing(_given: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        model_type: Its name in `config.json`.
        architecture: The class of transformers that has it.
        config_type: What our config of it is.
        fields: Keys that say what a field says, in the same way -> the field.
        layout: Where its tensors are.
        defaults: What it means when such a key is left out; without a default it must be there.
        implied: Fields that the family has without saying so.
        only: Keys that may have only some values.
        constants: Keys that are always written so.
        irrelevant: Keys of its own that nothing is computed with.
        drops_layers_behind: Whether a checkpoint has layers behind the last, which no text passes.
        read: Further fields of a config.json, whose keys it takes.
        write: Further keys of a config.json.
        ignored_by_mlx_lm: Fields that mlx-lm 0.32 does not read: there it computes as without them.
        fixed_in_mlx_lm: Fields that mlx-lm 0.32 does not read and whose arrays it needs as of these values: it opens no
            others.
    """

    model_type: str
    architecture: str
    config_type: type[GPTConfig] | type[MoEConfig]
    fields: Mapping[str, str]
    layout: Layout = field(default_factory=Layout)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    irrelevant: tuple[str, ...] = ()
    drops_layers_behind: bool = False
    read: Callable[[Keys], dict[str, Any]] = _nothing
    write: Callable[[Any], dict[str, Any]] = _nothing
    ignored_by_mlx_lm: tuple[str, ...] = ()
    fixed_in_mlx_lm: Mapping[str, Any] = field(default_factory=dict)

    def read_config(self, values: Mapping[str, Any], where: str) -> tuple[DecoderConfig, list[str]]:
        """The config of a model, and the keys that nothing is known of.

        Args:
            values: What `config.json` says.
            where: What errors call it: the file.

        Raises:
            HubError: A key is missing or says something that the model cannot compute.
        """
        keys = Keys(values, where)
        given = dict(self.implied)
        for key, name in self.fields.items():
            value = keys.take(key) if key in self.defaults else keys.require(key)
            given[name] = self.defaults.get(key) if value is None else value
        _require_layers(given["num_layers"], where)
        for key, allowed in self.only.items():
            keys.only(key, *allowed)
        given |= self.read(keys)
        for name, value in given.items():
            keys.require_possible(name, value)
        try:
            # As a checkpoint says it: it may have 1 where a field is a float.
            config = self.config_type.model_validate(given)
        except ValidationError as error:
            raise HubError(f"{where}: {self._problems(error)}.") from None
        return config, keys.left(self.irrelevant)

    def write_config(self, config: DecoderConfig) -> dict[str, Any]:
        """The keys of `config.json` that say the model's shape.

        Args:
            config: A model's config; whether the family can say it, `differences` tells.
        """
        resolved = resolve(config)
        said: dict[str, Any] = {"model_type": self.model_type, "architectures": [self.architecture]}
        said |= {key: resolved.get(name, getattr(config, name, None)) for key, name in self.fields.items()}
        return said | dict(self.constants) | self.write(config)

    def differences(self, config: DecoderConfig) -> list[str]:
        """Each field whose value the family cannot say, with what it would have to be.

        Args:
            config: Of a model.
        """
        if not isinstance(config, self.config_type):
            return [f"arch: {config.arch} (must be {self.config_type.model_fields['arch'].default})"]
        try:
            said, _ = self.read_config(self.write_config(config), self.model_type)
        except HubError as error:
            return [str(error).removeprefix(f"{self.model_type}: ").rstrip(".")]
        return different_fields(config, said)

    def refuses(self, config: DecoderConfig) -> bool:
        """Whether `differences` is the first reason alone why the family cannot say a config, not a list of fields.

        Args:
            config: Of a model of the family's architecture.
        """
        try:
            self.read_config(self.write_config(config), self.model_type)
        except HubError:
            return True
        return False

    def _problems(self, error: ValidationError) -> str:
        keys = {name: key for key, name in self.fields.items()}
        found = []
        for each in error.errors():
            path = ".".join(map(str, each["loc"]))
            found.append(f"{keys.get(path, path)}: {each['msg'].removeprefix('Value error, ').rstrip('.')}")
        return "; ".join(problem.removeprefix(": ") for problem in found)


def _require_layers(value: Any, where: str) -> None:
    """Raise for more layers than any model has: some fields name each of them."""
    if isinstance(value, int) and value > _MOST_LAYERS:
        raise HubError(f"{where}: the number of layers must be at most {_MOST_LAYERS} but got {value}.")


def different_fields(config: DecoderConfig, other: DecoderConfig) -> list[str]:
    """The fields in which two models compute different things, each with both values.

    Args:
        config: Of a model.
        other: Of a model of the same architecture.
    """
    ours, theirs = resolve(config), resolve(other)
    return [
        f"{name}: {ours[name]} (must be {theirs[name]})"
        for name in type(config).model_fields
        if name in ours.keys() & theirs.keys() and not _alike(ours[name], theirs[name])
    ]


def resolve(config: DecoderConfig) -> dict[str, Any]:
    """A config's fields without those of training, with the defaults that stand for others filled in.

    Args:
        config: Of a model.
    """
    values = {name: value for name, value in config.model_dump().items() if name not in _TRAINING_ONLY}
    values |= {
        "num_kv_heads": config.kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.mlp_size,
        "attention_bias": config.projection_bias,
        "mlp_bias": config.feed_forward_bias,
        "bias": config.bias and config.norm == "layer_norm",
        "attention_scale": config.score_scale,
    }
    layers = [layer for layer in range(config.num_layers) if config.window_of(layer) is not None]
    values["sliding_layers"] = layers or None
    if layers and config.rope_local_base is None and config.rope_scale == 1 and config.rope_scaling is None:
        values["rope_local_base"] = config.rope_base
    if config.rope_scaling is not None:
        values["rope_scaling"]["attention_factor"] = config.rope_scaling.rotation_factor
    if len(layers) == config.num_layers and config.rope_local_base is not None:
        # No layer is left for the other base.
        values |= {"rope_base": config.rope_local_base, "rope_scale": 1.0, "rope_scaling": None}
    if config.position != "learned":
        # Nothing is computed with it.
        del values["max_seq_len"]
    if isinstance(config, MoEConfig):
        values["expert_intermediate_size"] = config.expert_size
        if not config.dense_layers:
            del values["intermediate_size"]
        if config.kv_lora_rank is not None:
            del values["head_dim"], values["num_kv_heads"]
            values["latent_norm_eps"] = config.latent_eps
    return values


def _alike(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, float) and isinstance(theirs, (int, float)) and not isinstance(theirs, bool):
        return math.isclose(ours, theirs, rel_tol=1e-9)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_alike(ours[key], theirs[key]) for key in ours)
    return bool(ours == theirs)
