"""The metadata of a GGUF file read by key, each value checked for its type."""

from typing import Any

from forge_mlx.hub.errors import HubError
from forge_mlx.hub.gguf_file import GGUFFile
import numpy as np


class Metadata:
    """Values by key, which remembers what was asked for.

    Args:
        file: The file.

    Attributes:
        architecture: `general.architecture`, with which the keys of the model's shape begin.
        asked: Keys that were asked for.
    """

    def __init__(self, file: GGUFFile) -> None:
        self._path, self._values = file.path, file.metadata
        self.asked: set[str] = set()
        self.architecture = self.text("general.architecture")

    def own(self, key: str) -> str:
        """A key of the model's shape in full.

        Args:
            key: Without the architecture's name.
        """
        return f"{self.architecture}.{key}"

    def text(self, key: str, default: str | None = None) -> str:
        """A string.

        Args:
            key: In full.
            default: Where there is none; None: there must be one.

        Raises:
            HubError: It is missing or no string.
        """
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number, or one for each layer if all are the same.

        Args:
            key: In full.
            default: Where there is none; None: there must be one.

        Raises:
            HubError: It is missing, no whole number, or differs between layers.
        """
        value = self._get(key, default)
        if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iu":
            if value.min() != value.max():
                raise self._wrong(key, "the same for all layers", sorted({int(each) for each in value}))
            value = int(value[0])
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "a whole number", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number.

        Args:
            key: In full.
            default: Where there is none; None: there must be one.

        Raises:
            HubError: It is missing or no finite number.
        """
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not np.isfinite(value):
            raise self._wrong(key, "a finite number", value)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false.

        Args:
            key: In full.
            default: Where there is none.

        Raises:
            HubError: It is neither.
        """
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def texts(self, key: str) -> list[str]:
        """Strings; none where the key is missing.

        Args:
            key: In full.

        Raises:
            HubError: It is no list of strings.
        """
        value = self._get(key, [])
        # A list without elements may have any type.
        if isinstance(value, np.ndarray) and not value.size:
            value = []
        if not isinstance(value, list):
            raise self._wrong(key, "a list of strings", value)
        return value

    def numbers(self, key: str) -> "np.ndarray[Any, Any] | None":
        """Numbers; None where the key is missing.

        Args:
            key: In full.

        Raises:
            HubError: It is no list of numbers.
        """
        value = self._get(key, np.empty(0))
        if not isinstance(value, np.ndarray):
            raise self._wrong(key, "a list of numbers", value)
        return value if key in self._values else None

    def has(self, key: str) -> bool:
        """Whether there is a value.

        Args:
            key: In full.
        """
        return key in self._values

    def unasked(self) -> list[str]:
        """Keys of the model's shape that nobody asked for."""
        return sorted(key for key in self._values if key.startswith(self.own("")) and key not in self.asked)

    def _get(self, key: str, default: Any) -> Any:
        self.asked.add(key)
        value = self._values.get(key, default)
        if value is None:
            raise HubError(f"{self._path}: the metadata must have {key} but does not. Convert the model anew.")
        return value

    def _wrong(self, key: str, wanted: str, value: Any) -> HubError:
        shown = f"{len(value)} values" if isinstance(value, (list, np.ndarray)) and len(value) > 8 else repr(value)
        return HubError(f"{self._path}: {key} must be {wanted} but got {shown}.")
