"""The keys of a config.json, each taken once, so that those which nobody took can be named."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from forge_mlx.hub.errors import HubError

LARGEST: Final = 2**31 - 1
"""The largest integer that a key may have."""

# What no family computes with: where a model comes from, how its files are stored, how it is trained and sampled.
_ALWAYS_IRRELEVANT: Final = frozenset(
    {
        *("model_type", "architectures", "auto_map", "_name_or_path", "transformers_version", "unsloth_version"),
        *("unsloth_fixed", "transformers.js_config", "is_llama_config", "is_decoder", "is_encoder_decoder"),
        *("dtype", "torch_dtype", "quantization", "quantization_config", "use_cache", "cache_implementation"),
        *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "use_flash_attn"),
        *("attention_dropout", "hidden_dropout", "resid_dropout", "embd_dropout", "pretraining_tp"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id"),
        *("output_router_logits", "output_attentions", "output_hidden_states", "return_dict", "router_aux_loss_coef"),
        *("router_jitter_noise", "task_specific_params", "problem_type", "id2label", "label2id", "num_labels"),
        *("temperature", "top_k", "top_p", "do_sample", "max_length", "min_length", "repetition_penalty"),
        *("max_new_tokens", "chunk_size_feed_forward", "tokenizer_class", "gradient_checkpointing", "_num_labels"),
    }
)


class Keys:
    """A config.json that remembers what was taken of it.

    Args:
        values: Its keys and values.
        where: What errors call it: the file.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values, self._taken = values, set[str]()
        self.where = where

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key; the default where it is left out.

        Args:
            key: The key.
            default: What its absence means.
        """
        self._taken.add(key)
        return self._values.get(key, default)

    def require(self, key: str) -> Any:
        """The value of a key that must be there.

        Args:
            key: The key.

        Raises:
            HubError: It is not.
        """
        if key not in self._values:
            raise HubError(f"{self.where}: {key} must be there but is missing.")
        return self.take(key)

    def number(self, key: str, default: float | None = None) -> float | None:
        """A number; the default where it is left out or null.

        Args:
            key: The key.
            default: What its absence means.

        Raises:
            HubError: It is no number.
        """
        value = self.take(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise HubError(f"{self.where}: {key} must be a number but got {value!r}.")
        try:
            return float(value)
        except OverflowError:
            raise HubError(f"{self.where}: {key} must be a number of a model but is too large for one.") from None

    def count(self, key: str, default: int | None = None) -> int:
        """An integer of 0 or more; the default where it is left out or null.

        Args:
            key: The key.
            default: What its absence means; None: it must be there.

        Raises:
            HubError: It is no such number, or must be there and is not.
        """
        value = self.take(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < 0:
            raise HubError(f"{self.where}: {key} must be an integer of 0 or more but got {value!r}.")
        self.require_possible(key, value)
        return value

    def require_possible(self, key: str, value: Any) -> None:
        """Raise for an integer that no model has, before anything is computed with it.

        Args:
            key: The key that it is of.
            value: Anything.

        Raises:
            HubError: It is larger than what MLX has axes of.
        """
        if isinstance(value, int) and abs(value) > LARGEST:
            raise HubError(f"{self.where}: {key} must be at most {LARGEST} but has {len(str(value))} digits.")

    def without_effect(self, key: str) -> None:
        """A key that nothing is computed with, whatever it says: it is among those that are `left` unless it is null.

        Args:
            key: The key.
        """
        if self._values.get(key) is None:
            self._taken.add(key)

    def only(self, key: str, *allowed: Any) -> None:
        """Take a key that may have only some values; it may be left out, or null.

        Args:
            key: The key.
            allowed: The values that it may have.

        Raises:
            HubError: It has another.
        """
        value = self.take(key)
        if value is not None and value not in allowed:
            choice = " or ".join(map(repr, allowed)) if allowed else "left out"
            raise HubError(
                f"{self.where}: {key} must be {choice} but got {value!r}: the model would compute something that "
                "forge_mlx has not."
            )

    def inside(self, key: str) -> "Keys | None":
        """An object in a config.json; None where it is left out or null.

        Args:
            key: Its key.

        Raises:
            HubError: The value is no object.
        """
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise HubError(f"{self.where}: {key} must be an object but got {value!r}.")
        return Keys(value, f"{self.where}: {key}")

    def left(self, irrelevant: Iterable[str] = ()) -> list[str]:
        """The keys that were not taken and may matter, sorted.

        Args:
            irrelevant: Keys that do not matter, beside those that never do.
        """
        return sorted(self._values.keys() - self._taken - _ALWAYS_IRRELEVANT - set(irrelevant))
