"""Reading a training config: YAML, overrides from the command line, errors that name the key."""

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from forge_mlx.train.config import TrainConfig


class ConfigError(ValueError):
    """A config that cannot be used. The message names the file, the key, the value and what is allowed."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read and check a training config.

    Args:
        path: a YAML 1.2 file.
        overrides: ``key.path=value`` strings that replace or add values; the value is YAML.

    Raises:
        ConfigError: the file cannot be read, is no YAML, or holds a key or value that is not allowed; all
            problems are listed.
    """
    values = _read_yaml(path)
    for override in overrides:
        _apply_override(values, override)
    try:
        # JSON mode: strict, but a path may be written as a string and a pair as a list, as YAML has them.
        return TrainConfig.model_validate_json(json.dumps(values))
    except ValidationError as error:
        overridden = {text.split("=", 1)[0] for text in overrides}
        problems = [_explain(e, path, overridden) for e in error.errors(include_url=False)]
        raise ConfigError("\n".join(problems)) from None


def dump_config(config: BaseModel, path: Path) -> None:
    """Write a config as YAML, every default spelt out."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    with path.open("w", encoding="utf-8") as file:
        yaml.dump(config.model_dump(mode="json"), file)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    try:
        values = YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {_first_lines(error)}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold the sections {_names(TrainConfig)} but holds {values!r}.")
    try:
        json.dumps(values)
    except TypeError as error:
        raise ConfigError(f"{path}: {error}; write the value in quotes.") from None
    return values


def _first_lines(error: YAMLError) -> str:
    return " ".join(line.strip() for line in str(error).splitlines()[:6])


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)+", key):
        raise ConfigError(f"{override!r}: an override is written section.key=value, such as optim.lr=1e-3.")
    try:
        value = YAML(typ="safe", pure=True).load(text) if text.strip() else ""
    except YAMLError:
        value = text
    *sections, last = key.split(".")
    node: Any = values
    for section in sections:
        if node.get(section) is None:
            node[section] = {}
        node = node[section]
        if not isinstance(node, dict):
            raise ConfigError(f"{override!r}: {section} is not a section but {node!r}.")
    node[last] = value


def _explain(error: Any, path: Path, overridden: set[str]) -> str:
    location = [part for part in error["loc"] if not _is_union_branch(part)]
    key = ".".join(str(part) for part in location)
    source = "the command line" if key in overridden else str(path)
    if not location:
        return f"{source}: {_message(error)}."
    if error["type"] == "extra_forbidden":
        return f"{source}: {key}: there is no such key. {_suggest(location)}"
    if error["type"] == "missing":
        return f"{source}: {key}: is required but missing.{_help(location)}"
    got = "" if error["type"] == "value_error" else f" but got {error['input']!r}"
    return f"{source}: {key}: {_message(error)}{got}.{_help(location)}"


def _message(error: Any) -> str:
    if error["type"] == "value_error":
        return str(error["ctx"]["error"]).rstrip(".")
    message = str(error["msg"])
    return (message[0].lower() + message[1:]).replace("input should", "should")


def _is_union_branch(part: Any) -> bool:
    # pydantic names the tried member of a union in the path, such as "list[str]" or "constrained-str".
    return isinstance(part, str) and re.fullmatch(r"\w+", part) is None


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _models(member)


def _section(location: Sequence[Any]) -> type[BaseModel] | None:
    """The model whose fields the last key of ``location`` is one of."""
    model: type[BaseModel] | None = TrainConfig
    for part in location[:-1]:
        field = model.model_fields.get(str(part)) if model else None
        model = next(_models(field.annotation), None) if field else None
    return model


def _help(location: Sequence[Any]) -> str:
    section = _section(location)
    field = section.model_fields.get(str(location[-1])) if section else None
    return f" ({field.description})" if field and field.description else ""


def _names(section: type[BaseModel]) -> str:
    return ", ".join(section.model_fields)


def _all_keys(model: type[BaseModel] = TrainConfig, prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for section in _models(field.annotation):
            yield from _all_keys(section, f"{prefix}{name}.")


def _suggest(location: Sequence[Any]) -> str:
    section, name = _section(location), str(location[-1])
    if section:
        near = difflib.get_close_matches(name, section.model_fields, n=1)
        if near:
            return f"Did you mean {near[0]}?"
    elsewhere = [key for key in _all_keys() if key.rsplit(".", 1)[-1] == name]
    if elsewhere:
        return f"Did you mean {' or '.join(elsewhere)}?"
    return f"Allowed: {_names(section)}." if section else ""
