"""Reading a training config: YAML, overrides from the command line; and writing one."""

from collections.abc import Mapping, Sequence
import json
from pathlib import Path
import re
from types import NoneType
from typing import Any, cast

from forge_mlx.train.config import TrainConfig, of_kinds
from forge_mlx.train.explain import Key, Origin, explain_errors, plain_types, section_of, show, suggest
from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.representer import SafeRepresenter

_HEADER = "# Every setting of this run, defaults included.\n"
_SECTIONS = tuple(TrainConfig.model_fields)


class ConfigError(ValueError):
    """A config that cannot be used. The message names the file, the key, the value and what is allowed."""


class _Constructor(SafeConstructor):
    """YAML 1.2 has no dates: what looks like one is text."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


class _Representer(SafeRepresenter):
    """Lists of numbers on one line, all else one item a line."""

    def represent_list(self, data: list[Any]) -> SequenceNode:
        in_line = all(isinstance(item, (int, float)) for item in data)
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=in_line)


_Representer.add_representer(list, _Representer.represent_list)


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read and check a training config.

    Args:
        path: a YAML 1.2 file. A section with nothing in it has its defaults.
        overrides: ``key.path=value`` strings that replace or add values, the last one of a key winning. The value
            is YAML, but for a key that holds text it is taken as it stands, unless it begins with a quote.

    Raises:
        ConfigError: the file cannot be read, is no YAML, or holds a key or value that is not allowed; all
            problems are listed.
    """
    values, lines = _read_yaml(path)
    return make_config(values, overrides, path, lines)


def make_config(
    values: dict[str, Any], overrides: Sequence[str], path: Path, lines: Mapping[Key, int] | None = None
) -> TrainConfig:
    """Check the values of a training config.

    Args:
        values: of the sections, as YAML holds them; changed in place.
        overrides: as `load_config` takes them.
        path: the file that errors name.
        lines: the line of each key of the file.

    Raises:
        ConfigError: as from `load_config`.
    """
    root = _root(values, overrides)
    _fill_empty_sections(values, root)
    keys = [_apply_override(values, override, root) for override in overrides]
    try:
        # JSON mode: strict, but a path may be written as a string and a pair as a list, as YAML has them.
        read = root.model_validate_json(json.dumps(values))
        return TrainConfig(**{name: getattr(read, name) for name in TrainConfig.model_fields})
    except ValidationError as error:
        found = error.errors(include_url=False)
    problems = explain_errors(cast(list[Any], found), root, values, Origin(path, lines or {}, keys))
    if len(problems) > 1:
        problems = [f"{path}: {len(problems)} problems", *(f"  {problem}" for problem in problems)]
    raise ConfigError("\n".join(problems))


def dump_config(config: BaseModel, path: Path, note: str = "") -> None:
    """Write a config as YAML, every default spelt out.

    Args:
        config: of a run.
        path: of the file.
        note: a line that stands as a comment above it.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.Representer = _Representer
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    with path.open("w", encoding="utf-8") as file:
        file.write(_HEADER + (f"# {note}\n" if note else ""))
        for name, section in config.model_dump(mode="json").items():
            file.write("\n")
            yaml.dump({name: section}, file)


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    return yaml


def _read_yaml(path: Path) -> tuple[dict[str, Any], dict[Key, int]]:
    """The values of a file, and the line of each key."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: must be UTF-8 text but byte {error.start} is not.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    try:
        values = _yaml().load(text)
    except YAMLError as error:
        raise ConfigError(_explain_yaml(error, path)) from None
    if values is None:
        raise ConfigError(f"{path}: must hold the sections {', '.join(_SECTIONS)} but is empty.")
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold the sections {', '.join(_SECTIONS)} but holds {show(values)}.")
    try:
        values = json.loads(json.dumps(values))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: must hold only texts, numbers, lists and sections: {error}.") from None
    return values, dict(_key_lines(_yaml().compose(text)))


def _key_lines(node: Node, prefix: Key = ()) -> list[tuple[Key, int]]:
    found: list[tuple[Key, int]] = []
    for key, value in node.value if isinstance(node, MappingNode) else ():
        if isinstance(key, ScalarNode):
            path = (*prefix, str(key.value))
            found += [(path, key.start_mark.line + 1), *_key_lines(value, path)]
    return found


def _explain_yaml(error: YAMLError, path: Path) -> str:
    mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
    place = f"{path}:{mark.line + 1}" if mark else str(path)
    problem = str(error.problem if isinstance(error, MarkedYAMLError) else error).splitlines()[0]
    if isinstance(error, DuplicateKeyError):
        name = re.search(r'duplicate key "(.*?)" with', problem)
        return f"{place}: {name[1] if name else problem}: is there twice; keep one."
    hint = ""
    if "'\\t'" in problem:
        hint = " Indent with spaces, not tabs."
    elif "mapping values" in problem:
        hint = " Check the colons and the indentation here and just above."
    return f"{place}: not valid YAML: {problem}.{hint}"


def _root(values: dict[str, Any], overrides: Sequence[str]) -> type[TrainConfig]:
    """The config with the kinds of sections that the file and the command line have keys of."""
    named = {override.partition("=")[0] for override in overrides}
    model, data = values.get("model"), values.get("data")
    pretrained = "model.path" in named or (isinstance(model, dict) and "path" in model)
    examples = "data.format" in named or (isinstance(data, dict) and "format" in data)
    architecture = model.get("arch", "gpt") if isinstance(model, dict) else "gpt"
    plain = of_kinds("gpt", pretrained=False, examples=False)
    for override in overrides:
        key, _, text = override.partition("=")
        if key == "model.arch":
            architecture = _override_value(("model", "arch"), text, override, plain)
    return of_kinds(architecture, pretrained=pretrained, examples=examples)


def _fill_empty_sections(values: dict[str, Any], model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        section = field.annotation
        if name in values and isinstance(section, type) and issubclass(section, BaseModel):
            if values[name] is None:
                values[name] = {}
            if isinstance(values[name], dict):
                _fill_empty_sections(values[name], section)


def _nullable_sections(root: type[TrainConfig]) -> list[str]:
    return [name for name, field in root.model_fields.items() if NoneType in plain_types(field.annotation)]


def _apply_override(values: dict[str, Any], override: str, root: type[TrainConfig]) -> Key:
    """Put the value of one override in its place; return its key."""
    name, equals, text = override.partition("=")
    key = tuple(name.split("."))
    if name in _nullable_sections(root):
        if _override_value(key, text, override, root) is not None:
            raise ConfigError(
                f"command line: {override}: a whole section can only be left out, by {name}=null. Set its keys one by "
                f"one, such as {name}.key=value."
            )
        values[name] = None
        return key
    if not equals or not re.fullmatch(r"[^.\s]+(\.[^.\s]+)+", name):
        hint = f" {suggest(root, key)}" if re.fullmatch(r"\w+", name) and name not in _SECTIONS else ""
        raise ConfigError(
            f"command line: {override}: an override is written section.key=value, such as optim.lr=1e-3.{hint}"
        )
    node: Any = values
    for depth, part in enumerate(key[:-1], start=1):
        if node.get(part) is None and section_of(root, (*key[:depth], "")):
            # A section that is null is there again with its first key.
            node[part] = {}
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            parent = ".".join(key[:depth])
            raise ConfigError(f"command line: {override}: {parent} has no keys of its own; its value is {show(node)}.")
    node[key[-1]] = _override_value(key, text, override, root)
    return key


def _override_value(key: Key, text: str, override: str, root: type[TrainConfig]) -> Any:
    try:
        text.encode()
        value = _yaml().load(text) if text.strip() else ""
        json.dumps(value)
    except UnicodeEncodeError:
        raise ConfigError(f"command line: {override!r}: must be UTF-8 text.") from None
    except (YAMLError, TypeError, ValueError):
        return text
    section = section_of(root, key)
    field = section.model_fields.get(key[-1]) if section else None
    types = plain_types(field.annotation) if field else set()
    null = value is None and NoneType in types
    return text if types & {str, Path} and not null and text[:1] not in ("'", '"') else value
