"""What is wrong with a config, in words for the person who wrote it: file, line, key, value, what is allowed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
import difflib
import json
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from forge_mlx.models.registry import ARCHITECTURES
from forge_mlx.train.pretrained_config import PretrainedConfig
from pydantic import BaseModel
from pydantic.fields import FieldInfo

Key = tuple[str, ...]

_LONGEST_VALUE = 80
_LONGEST_DESCRIPTION = 200
_WORDS: dict[Any, str] = {
    NoneType: "null",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
}
# Attributes of a field's constraints: which end they bound, and the words for it.
_BOUNDS = {
    "ge": ("low", "at least"),
    "gt": ("low", "greater than"),
    "le": ("high", "at most"),
    "lt": ("high", "less than"),
    "min_length": ("items", "at least"),
}


@dataclass(frozen=True)
class Origin:
    """Where each value of a config came from.

    Attributes:
        path: the config file.
        lines: the line of each key of the file, counted from 1.
        overrides: the keys that the command line set.
    """

    path: Path
    lines: Mapping[Key, int]
    overrides: Sequence[Key]

    def of(self, key: Key) -> str:
        """The command line, else file and line of the key or of the innermost section that is there.

        Args:
            key: its names. One that holds dots, as a pattern does, may be given in parts.
        """
        key = self._as_written(key)
        for override in self.overrides:
            created = key not in self.lines and override[: len(key)] == key
            if created or key[: len(override)] == override:
                return "command line"
        for end in range(len(key), 0, -1):
            if line := self.lines.get(key[:end]):
                return f"{self.path}:{line}"
        return str(self.path)

    def _as_written(self, key: Key) -> Key:
        """The key of the file that reads the same, or that the key lies in."""
        for end in range(len(key), 0, -1):
            for known in self.lines:
                if _dotted(known) == _dotted(key[:end]):
                    return (*known, *key[end:])
        return key


def explain_errors(
    errors: Sequence[Mapping[str, Any]], root: type[BaseModel], values: Any, origin: Origin
) -> list[str]:
    """One line for each key that is wrong.

    Args:
        errors: of a pydantic ValidationError.
        root: the model of the whole config.
        values: what was validated.
        origin: where the values came from.
    """
    lines: dict[Any, str] = {}
    for error in errors:
        location = tuple(error["loc"])
        key, field, rest = _find(root, location)
        if error["type"] == "extra_forbidden":
            name = tuple(str(part) for part in location)
            meant = suggest(root, name, error["input"])
            lines[name] = f"{origin.of(name)}: {_dotted(name)}: there is no such key. {meant}"
        elif error["type"] == "value_error":
            lines |= _validator_lines(error, key, root, origin)
        elif key not in lines or _is_item(rest):
            # The tried members of a union report one by one, and so do the items of a list: one line for all.
            lines[key] = f"{origin.of(key)}: {_dotted(key)}: {_field_problem(error, key, field, rest, values)}"
    return list(lines.values())


def suggest(root: type[BaseModel], key: Key, value: Any = None) -> str:
    """The existing key that was probably meant, else the keys of the section.

    Args:
        root: the model of the whole config.
        key: that does not exist.
        value: of it; the one key of the section that takes this word is likelier than the same name elsewhere.
    """
    section, name = section_of(root, key), key[-1]
    if section is PretrainedConfig and any(name in kind.config.model_fields for kind in ARCHITECTURES.values()):
        return "With model.path the checkpoint says the model's shape. Leave the key out."
    known = list(all_keys(root))
    found = [other for other in known if other[-1] == name]
    takers = [other for other, field in section.model_fields.items() if value in _choices(field)] if section else []
    if found and len(takers) == 1:
        found = [(*key[:-1], *takers)]
    if section and not found:
        near = difflib.get_close_matches(name, section.model_fields, n=1)
        found = [(*key[:-1], *near)] if near else []
    if not found:
        names = difflib.get_close_matches(name, {other[-1] for other in known}, n=1, cutoff=0.75)
        found = [other for other in known if other[-1] in names]
    if found:
        return f"Did you mean {' or '.join(_dotted(other) for other in found)}?"
    return f"Allowed: {', '.join(section.model_fields)}." if section else ""


def all_keys(model: type[BaseModel], prefix: Key = ()) -> Iterator[Key]:
    """Every key path of a config, sections too."""
    for name, field in model.model_fields.items():
        yield (*prefix, name)
        if section := _section(field):
            yield from all_keys(section, (*prefix, name))


def section_of(root: type[BaseModel], key: Key) -> type[BaseModel] | None:
    """The model whose field the last name of a key should be, or None."""
    _, field, rest = _find(root, key[:-1])
    return None if rest else _section(field)


def plain_types(annotation: Any) -> set[Any]:
    """The members of a union without their annotations."""
    if get_origin(annotation) is Annotated:
        return plain_types(get_args(annotation)[0])
    members = _members(annotation)
    return {annotation} if len(members) == 1 else {kind for member in members for kind in plain_types(member)}


def _find(root: type[BaseModel], location: Sequence[Any]) -> tuple[Key, FieldInfo, Sequence[Any]]:
    """The key and the field at a location, and what the location names inside that field."""
    field = FieldInfo.from_annotation(root)
    for depth, part in enumerate(location):
        inner = _inner(field, part)
        if inner is None:
            return tuple(location[:depth]), field, location[depth:]
        field = inner
    return tuple(location), field, ()


def _inner(field: FieldInfo, name: Any) -> FieldInfo | None:
    """The field that a name stands for inside a section; in one of keys of your own every name has the same."""
    if section := _section(field):
        return section.model_fields.get(name)
    if get_origin(field.annotation) is dict:
        return FieldInfo.from_annotation(get_args(field.annotation)[1])
    return None


def _section(field: FieldInfo) -> type[BaseModel] | None:
    for member in _members(field.annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            return member
    return None


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _field_problem(error: Mapping[str, Any], key: Key, field: FieldInfo, rest: Sequence[Any], values: Any) -> str:
    text = f" ({_short_description(field.description)})" if field.description else ""
    if error["type"] == "missing" and not rest:
        return f"is required but missing.{text}"
    value = values
    for name in key:
        value = value[name]
    allowed = _describe(field.annotation, field.metadata)
    if error["type"] == "finite_number":
        allowed = allowed.replace("a number", "a finite number")
    got = show(value)
    if _is_item(rest) and error["type"] != "missing":
        got += f" (item {rest[-1] + 1} is {show(error['input'])})"
    comma = "," if "," in allowed else ""
    return f"must be {allowed}{comma} but got {got}.{_meant(field, value)}{text}"


def _short_description(text: str) -> str:
    """A description, of a long one its first sentence."""
    return text.rstrip(".") if len(text) <= _LONGEST_DESCRIPTION else text.split(". ")[0].rstrip(".")


def _is_item(rest: Sequence[Any]) -> bool:
    return bool(rest) and isinstance(rest[-1], int)


def _meant(field: FieldInfo, value: Any) -> str:
    near = difflib.get_close_matches(value, _choices(field), n=1) if isinstance(value, str) else []
    return f" Did you mean {near[0]}?" if near else ""


def _choices(field: FieldInfo) -> list[Any]:
    return [choice for m in _members(field.annotation) if get_origin(m) is Literal for choice in get_args(m)]


def _validator_lines(error: Mapping[str, Any], key: Key, root: type[BaseModel], origin: Origin) -> dict[Any, str]:
    """The lines of a check over several fields: each begins with the key, relative to its section, that it blames."""
    lines = {}
    for message in str(error["ctx"]["error"]).splitlines():
        blamed = (*key, *message.split()[0].rstrip(":").split("."))
        named = not key or _find(root, blamed[: len(key) + 1])[2] == ()
        section = f"{_dotted(key)}{'.' if named else ': '}" if key else ""
        lines[blamed, message] = f"{origin.of(blamed)}: {section}{message.rstrip('.')}."
    return lines


def _describe(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """The values that a field takes, such as ``a whole number, at least 1, or null``."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _describe(arguments[0], [*metadata, *arguments[1:]])
    bounds = _bounds(metadata)
    if len(members := _members(annotation)) > 1:
        described = [_describe(m, metadata if m is not NoneType else ()) for m in members]
        comma = "," if any("," in d for d in described[:-1]) else ""
        return f"{', '.join(described[:-1])}{comma} or {described[-1]}"
    if origin is Literal:
        *others, last = (str(choice) for choice in arguments)
        return f"{', '.join(others)} or {last}" if others else last
    if origin is list:
        size = f" of {bounds['items']}" if "items" in bounds else ""
        return f"a list{size}, each {_describe(arguments[0])}"
    if origin is dict:
        return "a section of keys of your own"
    if origin is tuple:
        return f"a list of {len(arguments)}, each {_describe(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a section with the keys {', '.join(annotation.model_fields)}"
    if bounds.pop("items", 0):
        return "non-empty text"
    return ", ".join([_WORDS[annotation], *filter(None, [" and ".join(bounds.values())])])


def _bounds(metadata: Sequence[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in metadata:
        if isinstance(item, FieldInfo):
            found |= _bounds(item.metadata)
        for name, (end, words) in _BOUNDS.items():
            if (bound := getattr(item, name, None)) is not None:
                found[end] = f"{words} {bound}"
    return found


def show(value: Any) -> str:
    """A value as YAML and JSON write it, cut after 80 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]} ..."


def _dotted(key: Key) -> str:
    return ".".join(key)
