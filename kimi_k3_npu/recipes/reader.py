"""Reading recipe files: every key is known, every value has the right type, every reference leads somewhere."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml

from kimi_k3_npu.ops.device import Soc
from kimi_k3_npu.recipes.engine_flags import load_flags
from kimi_k3_npu.recipes.schema import (
    DERIVED,
    Checkpoint,
    CheckpointFormat,
    Container,
    Engine,
    EngineName,
    Hardware,
    Input,
    Measured,
    NodeSettings,
    Recipe,
    RecipeError,
    Role,
    Setting,
    Status,
)
from kimi_k3_npu.resources import resource_path

T = TypeVar("T")
_REQUIRED: Any = object()
#: What a value may refer to beside the recipe's own inputs and the addresses of its roles ("decode_addr").
BUILT_IN = ("model_path", "master_addr", "node_addr", "node_rank", "nodes")
PLACEHOLDER = re.compile(r"\{([a-z][a-z0-9_]*)\}")


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.stem for path in resource_path("recipes").glob("*.yaml") if path.stem != "glossary")


def load_recipe(name: str | Path) -> Recipe:
    """The recipe of that name, or of that file. Raises RecipeError, naming the key, for anything wrong with it."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = resource_path("recipes", f"{name}.yaml")
    if not path.is_file():
        raise RecipeError(f"no recipe {name}{near(str(name), recipe_names())}; there are: {', '.join(recipe_names())}")
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path.name}: not valid YAML ({error})") from None
    return read_recipe(raw, path.stem)


@functools.cache
def glossary() -> Mapping[str, Any]:
    """recipes/glossary.yaml: what variables and flags are for, and which names have gone."""
    return yaml.safe_load(resource_path("recipes", "glossary.yaml").read_text(encoding="utf-8"))


def read_recipe(raw: Any, name: str) -> Recipe:
    """A recipe from the parsed file. Raises RecipeError."""
    top = _Keys(raw, name)
    top.take("templates", dict, {})  # anchors that the file itself refers to
    sources = {key: _text(value, f"{name}.sources.{key}") for key, value in top.take("sources", dict).items()}
    source = top.choice("source", sources)
    engine = _engine(top.keys("engine"))
    roles_raw = top.take("roles", dict)
    inputs = {key: _input(_Keys(value, f"{name}.inputs.{key}")) for key, value in top.take("inputs", dict, {}).items()}
    read = _Settings(engine, source, sources, {*inputs, *BUILT_IN, *(f"{role}_addr" for role in roles_raw)})
    recipe = Recipe(
        name=name,
        title=top.take("title", str),
        status=top.choice("status", get_args(Status)),
        source=source,
        sources=sources,
        hardware=_hardware(top.keys("hardware")),
        engine=engine,
        checkpoint=_checkpoint(top.keys("checkpoint")),
        container=_container(top.keys("container")) if "container" in top.values else None,
        inputs=inputs,
        roles={role: _role(_Keys(value, f"{name}.roles.{role}"), role, read) for role, value in roles_raw.items()},
        measured=tuple(
            _measured(_Keys(value, f"{name}.measured.{i}"), read)
            for i, value in enumerate(top.take("measured", list, []))
        ),
        notes=tuple(top.take("notes", list, [])),
        known_problems=dict(top.take("known_problems", dict, {})),
        derived=dict(top.take("derived", dict, {})),
    )
    top.finish()
    _check(recipe, raw)
    return recipe


def _check(recipe: Recipe, raw: Mapping[str, Any]) -> None:
    nodes = sum(role.nodes for role in recipe.roles.values())
    if nodes != recipe.hardware.nodes:
        raise RecipeError(f"{recipe.name}: hardware has {recipe.hardware.nodes} nodes, the roles use {nodes}")
    if recipe.known_problems and recipe.status != "unverified":
        raise RecipeError(f"{recipe.name}: has known_problems, so its status must be unverified, not {recipe.status}")
    for path in recipe.derived:
        value: Any = raw
        for key in path.split("."):
            if not isinstance(value, Mapping) or key not in value:
                raise RecipeError(f"{recipe.name}.derived: {path} is not in this recipe")
            value = value[key]


class _Keys:
    """A mapping of the file, taken key by key; `finish` refuses what nobody took."""

    def __init__(self, values: Any, path: str) -> None:
        if not isinstance(values, Mapping):
            raise RecipeError(f"{path}: is {_kind(values)}, expected a mapping")
        self.values, self.path = values, path
        self._taken: set[str] = set()

    def take(self, key: str, kind: type | tuple[type, ...], default: Any = _REQUIRED) -> Any:
        self._taken.add(key)
        if key not in self.values:
            if default is _REQUIRED:
                raise RecipeError(f"{self.path}: {key} is missing")
            return default
        value = self.values[key]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(_NAMES[kind] for kind in kinds)
            raise RecipeError(f"{self.path}.{key}: is {_kind(value)}, expected {wanted}")
        return value

    def choice(self, key: str, allowed: Iterable[str], default: Any = _REQUIRED) -> Any:
        value, allowed = self.take(key, str, default), list(allowed)
        if value is not default and value not in allowed:
            raise RecipeError(f"{self.path}.{key}: {value!r} is none of {', '.join(allowed)}{near(value, allowed)}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        return tuple(_text(item, f"{self.path}.{key}.{i}") for i, item in enumerate(self.take(key, list, [])))

    def keys(self, key: str) -> _Keys:
        return _Keys(self.take(key, dict), f"{self.path}.{key}")

    def finish(self) -> None:
        if unknown := [str(key) for key in self.values if key not in self._taken]:
            raise RecipeError(
                f"{self.path}: unknown key {unknown[0]!r}{near(unknown[0], self._taken)}; "
                f"keys: {', '.join(sorted(self._taken))}"
            )


class _Settings:
    """Reads flags and variables: where their reasons are, and what they may refer to."""

    def __init__(self, engine: Engine, source: str, sources: Mapping[str, str], names: set[str]) -> None:
        self.source, self.sources, self.names = source, sources, names
        self._options = load_flags(engine.flags)
        self._reasons = {"flags": glossary()["flags"][engine.name], "environment": glossary()["variables"]}

    def read(self, owner: _Keys, section: str) -> dict[str, Setting]:
        entries = owner.take(section, dict, {})
        return {
            self._options.canonical(str(name)): self._one(value, f"{owner.path}.{section}.{name}", section, str(name))
            for name, value in entries.items()
        }

    def _one(self, raw: Any, path: str, section: str, name: str) -> Setting:
        entry = _Keys(raw if isinstance(raw, Mapping) and "value" in raw else {"value": raw}, path)
        kinds = (str, int, float, list, bool, dict) if section == "flags" else (str, int, float)
        value = entry.take("value", kinds)
        why, source = entry.take("why", str, None), entry.take("source", str, self.source)
        entry.finish()
        if value is False:
            raise RecipeError(f"{path}: is false; leave a flag out that is not given")
        if why is None and source == DERIVED:
            raise RecipeError(f"{path}: is derived, so it needs a why")
        why = why or self._reasons[section].get(name)
        if why is None and section == "environment":
            raise RecipeError(f"{path}: has no reason; give it a why, or an entry in glossary.yaml")
        self.check_source(source, path)
        self.check_references(value, path)
        if section == "flags" and value is not True and not _refers(value):
            if found := list(self._options.faults(name, value)):
                raise RecipeError(f"{path}: {found[0]}")
            value = self._options.read(name, value)
        return Setting(value, why or "", source)

    def check_source(self, source: str, path: str) -> None:
        if source != DERIVED and source not in self.sources:
            raise RecipeError(f"{path}: source {source!r} is not under sources, and is not {DERIVED!r}")

    def check_references(self, value: Any, path: str) -> None:
        if isinstance(value, str):
            for name in PLACEHOLDER.findall(value):
                if name not in self.names:
                    raise RecipeError(f"{path}: {{{name}}} is not an input{near(name, self.names)}")
        elif isinstance(value, Mapping | list):
            for item in value.values() if isinstance(value, Mapping) else value:
                self.check_references(item, path)


def _refers(value: Any) -> bool:
    """Whether an input is to be filled in."""
    return bool(PLACEHOLDER.search(json.dumps(value)))


def _hardware(keys: _Keys) -> Hardware:
    hardware = Hardware(
        soc=keys.choice("soc", get_args(Soc)),
        nodes=keys.take("nodes", int),
        dies_per_node=keys.take("dies_per_node", int),
        memory_gib_per_die=keys.take("memory_gib_per_die", (int, float), None),
        cann=keys.take("cann", str, None),
        chip=keys.take("chip", str, None),
    )
    keys.finish()
    if (hardware.soc == "cpu") != (hardware.cann is None):
        raise RecipeError(f"{keys.path}: an NPU has a cann version, a CPU has none")
    return hardware


def _engine(keys: _Keys) -> Engine:
    engine = Engine(
        name=keys.choice("name", get_args(EngineName)),
        version=keys.take("version", str),
        flags=keys.take("flags", str),
    )
    keys.finish()
    return engine


def _checkpoint(keys: _Keys) -> Checkpoint:
    checkpoint = Checkpoint(
        format=keys.choice("format", get_args(CheckpointFormat)),
        target=keys.take("target", str),
        draft=keys.take("draft", str, None),
    )
    keys.finish()
    return checkpoint


def _container(keys: _Keys) -> Container:
    container = Container(
        image=keys.take("image", str, None),
        options=keys.texts("options"),
        devices=keys.texts("devices"),
        mounts=keys.texts("mounts"),
    )
    keys.finish()
    return container


def _input(keys: _Keys) -> Input:
    default = keys.take("default", (str, int), None)
    found = Input(
        what=keys.take("what", str),
        example=str(keys.take("example", (str, int), default if default is not None else _REQUIRED)),
        default=None if default is None else str(default),
    )
    keys.finish()
    return found


def _role(keys: _Keys, name: str, read: _Settings) -> Role:
    role = Role(
        name=name,
        nodes=keys.take("nodes", int),
        command=keys.texts("command"),
        set_up=keys.texts("set_up"),
        unset=keys.texts("unset"),
        environment=read.read(keys, "environment"),
        flags=read.read(keys, "flags"),
        per_node=tuple(
            _node_settings(_Keys(value, f"{keys.path}.per_node.{i}"), read)
            for i, value in enumerate(keys.take("per_node", list, []))
        ),
    )
    keys.finish()
    read.check_references(list(role.command), f"{keys.path}.command")
    if not role.command:
        raise RecipeError(f"{keys.path}.command: is empty")
    if outside := [node for part in role.per_node for node in part.nodes if not 0 <= node < role.nodes]:
        raise RecipeError(f"{keys.path}.per_node: node {outside[0]} is outside 0..{role.nodes - 1}")
    return role


def _node_settings(keys: _Keys, read: _Settings) -> NodeSettings:
    found = NodeSettings(
        nodes=tuple(keys.take("nodes", list)),
        flags=read.read(keys, "flags"),
        environment=read.read(keys, "environment"),
    )
    keys.finish()
    return found


def _measured(keys: _Keys, read: _Settings) -> Measured:
    found = Measured(
        what=keys.take("what", str), numbers=dict(keys.take("numbers", dict, {})), source=keys.take("source", str)
    )
    keys.finish()
    read.check_source(found.source, keys.path)
    return found


def near(word: str, words: Iterable[str]) -> str:
    """As `did_you_mean`, to go on a sentence with."""
    question = did_you_mean(word, words)
    return f"; {question}" if question else ""


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Ask for the words most like `word`; nothing where none is like it."""
    matches = difflib.get_close_matches(word, list(words), n=2)
    return f"did you mean {' or '.join(matches)}?" if matches else ""


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise RecipeError(f"{path}: is {_kind(value)}, expected text")
    return value


_NAMES: dict[type, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "a mapping",
    bool: "true",
}


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"{_NAMES.get(type(value), type(value).__name__)} ({value!r})"
