"""Reading recipe files: pydantic says that every key is known and every value has the right type; every reference leads
somewhere."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from kimi_k3_npu.recipes.engine_flags import load_flags
from kimi_k3_npu.recipes.schema import DERIVED, NodeSettings, Recipe, RecipeError, Role, Setting
from kimi_k3_npu.resources import resource_path

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Part = TypeVar("Part", Role, NodeSettings)
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
    """A recipe from the parsed file. Raises RecipeError for everything that pydantic finds, else for the first thing
    that refers to nothing."""
    recipe = _validated(_with_names(raw, name), name)
    if recipe.source not in recipe.sources:
        choices = f"{', '.join(recipe.sources)}{near(recipe.source, recipe.sources)}"
        raise RecipeError(f"{name}.source: {recipe.source!r} is none of {choices}")
    read = _Settings(recipe)
    roles = {key: _role(role, f"{name}.roles.{key}", read) for key, role in recipe.roles.items()}
    for i, measured in enumerate(recipe.measured):
        read.check_source(measured.source, f"{name}.measured.{i}")
    _check(recipe, raw)
    return replace(recipe, roles=roles)


def _with_names(raw: Any, name: str) -> Any:
    """Give the recipe its file's name and roles their keys'. `templates` goes: only the file's own anchors need it."""
    if not isinstance(raw, Mapping):
        return raw
    named = {key: value for key, value in raw.items() if key != "templates"}
    _refuse_name(raw, name)
    if isinstance(roles := raw.get("roles"), Mapping):
        named["roles"] = {}
        for key, role in roles.items():
            _refuse_name(role, f"{name}.roles.{key}")
            named["roles"][key] = {**role, "name": str(key)} if isinstance(role, Mapping) else role
    return {**named, "name": name}


def _refuse_name(raw: Any, path: str) -> None:
    if isinstance(raw, Mapping) and "name" in raw:
        raise RecipeError(f"{path}: unknown key 'name'; a recipe is named by its file, a role by its key")


def _validated(raw: Any, name: str) -> Recipe:
    try:
        # As JSON, whose lists may become tuples and whose mappings classes while nothing else is converted.
        return _recipes().validate_json(json.dumps(raw, default=str))
    except ValidationError as error:
        raise RecipeError("\n".join(_fault(one, name) for one in error.errors(include_url=False))) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise RecipeError(f"{name}: {error}") from None


@functools.cache
def _recipes() -> TypeAdapter[Recipe]:
    return TypeAdapter(Recipe)


def _fault(error: ErrorDetails, name: str) -> str:
    """One error of pydantic's in the words of this package."""
    *outer, key = error["loc"] or ("",)
    above, path = ".".join(map(str, (name, *outer))), ".".join(map(str, (name, *error["loc"])))
    value, kind = error["input"], error["type"]
    if kind == "missing":
        return f"{above}: {key} is missing"
    if kind == "unexpected_keyword_argument":
        keys = _keys(outer)
        return f"{above}: unknown key {key!r}{near(str(key), keys)}; keys: {', '.join(keys)}"
    if kind == "literal_error":
        allowed = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        return f"{path}: {value!r} is none of {', '.join(allowed)}{near(str(value), allowed)}"
    if kind in _EXPECTED:
        return f"{path}: is {_kind(value)}, expected {_EXPECTED[kind]}"
    return f"{path}: {error['msg'].removeprefix('Value error, ')}"


def _keys(loc: Iterable[int | str]) -> list[str]:
    """What the mapping at `loc` of a recipe may have."""
    kind: Any = Recipe
    is_member = False
    for part in loc:
        if is_member:  # of a mapping or tuple, all of whose members are of one class
            is_member = False
            continue
        hint = get_type_hints(kind)[str(part)]
        kind, is_member = _class_in(hint), get_origin(hint) in (Mapping, tuple)
    return sorted(one.name for one in fields(kind) if one.name != "name" or kind not in (Recipe, Role))


def _class_in(hint: Any) -> Any:
    return hint if is_dataclass(hint) else next(filter(None, map(_class_in, get_args(hint))), None)


def _check(recipe: Recipe, raw: Mapping[str, Any]) -> None:
    hardware = recipe.hardware
    if (hardware.soc == "cpu") != (hardware.cann is None):
        raise RecipeError(f"{recipe.name}.hardware: an NPU has a cann version, a CPU has none")
    nodes = sum(role.nodes for role in recipe.roles.values())
    if nodes != hardware.nodes:
        raise RecipeError(f"{recipe.name}: hardware has {hardware.nodes} nodes, the roles use {nodes}")
    if recipe.known_problems and recipe.status != "unverified":
        raise RecipeError(f"{recipe.name}: has known_problems, so its status must be unverified, not {recipe.status}")
    for path in recipe.derived:
        value: Any = raw
        for key in path.split("."):
            if not isinstance(value, Mapping) or key not in value:
                raise RecipeError(f"{recipe.name}.derived: {path} is not in this recipe")
            value = value[key]


class _Settings:
    """Completes flags and variables: where their reasons are, and what they may refer to."""

    def __init__(self, recipe: Recipe) -> None:
        self.source, self.sources = recipe.source, recipe.sources
        self.names = {*recipe.inputs, *BUILT_IN, *(f"{role}_addr" for role in recipe.roles)}
        self._options = load_flags(recipe.engine.flags)
        self._reasons = {"flags": glossary()["flags"][recipe.engine.name], "environment": glossary()["variables"]}

    def complete(self, part: Part, path: str) -> Part:
        """A role, or the settings of some of its nodes, with every reason, source and value as it is meant."""
        flags = {
            self._options.canonical(name): self._flag(name, setting, f"{path}.flags.{name}")
            for name, setting in part.flags.items()
        }
        environment = {
            name: self._variable(name, setting, f"{path}.environment.{name}")
            for name, setting in part.environment.items()
        }
        return replace(part, flags=flags, environment=environment)

    def _flag(self, name: str, setting: Setting, path: str) -> Setting:
        value = setting.value
        if value is False:
            raise RecipeError(f"{path}: is false; leave a flag out that is not given")
        setting = self._explained("flags", name, setting, path)
        if value is not True and not _refers(value):
            if found := list(self._options.faults(name, value)):
                raise RecipeError(f"{path}: {found[0]}")
            value = self._options.read(name, value)
        return replace(setting, value=value)

    def _variable(self, name: str, setting: Setting, path: str) -> Setting:
        if isinstance(setting.value, bool | list | dict):
            raise RecipeError(f"{path}: is {_kind(setting.value)}, expected text or a number")
        setting = self._explained("environment", name, setting, path)
        if not setting.why:
            raise RecipeError(f"{path}: has no reason; give it a why, or an entry in glossary.yaml")
        return setting

    def _explained(self, section: str, name: str, setting: Setting, path: str) -> Setting:
        source = setting.source or self.source
        if not setting.why and source == DERIVED:
            raise RecipeError(f"{path}: is derived, so it needs a why")
        self.check_source(source, path)
        self.check_references(setting.value, path)
        return replace(setting, why=setting.why or self._reasons[section].get(name, ""), source=source)

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


def _role(role: Role, path: str, read: _Settings) -> Role:
    read.check_references(list(role.command), f"{path}.command")
    if not role.command:
        raise RecipeError(f"{path}.command: is empty")
    if outside := [node for part in role.per_node for node in part.nodes if not 0 <= node < role.nodes]:
        raise RecipeError(f"{path}.per_node: node {outside[0]} is outside 0..{role.nodes - 1}")
    per_node = tuple(read.complete(part, f"{path}.per_node.{i}") for i, part in enumerate(role.per_node))
    return replace(read.complete(role, path), per_node=per_node)


def near(word: str, words: Iterable[str]) -> str:
    """As `did_you_mean`, to go on a sentence with."""
    question = did_you_mean(word, words)
    return f"; {question}" if question else ""


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Ask for the words most like `word`; nothing where none is like it."""
    matches = difflib.get_close_matches(word, list(words), n=2)
    return f"did you mean {' or '.join(matches)}?" if matches else ""


_KINDS: dict[type, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "a mapping",
    bool: "true or false",
}
#: The same by the name of pydantic's error for a value of another kind.
_EXPECTED = {
    "string_type": _KINDS[str],
    "int_type": _KINDS[int],
    "float_type": _KINDS[float],
    "tuple_type": _KINDS[list],
    "dict_type": _KINDS[dict],
    "dataclass_type": _KINDS[dict],
}


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"{_KINDS.get(type(value), type(value).__name__)} ({value!r})"
