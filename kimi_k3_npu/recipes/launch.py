"""One process of a recipe with everything filled in: its command, flags and environment, after the user's changes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kimi_k3_npu.recipes.addresses import before_port
from kimi_k3_npu.recipes.engine_flags import EngineFlags, load_flags
from kimi_k3_npu.recipes.reader import BUILT_IN, PLACEHOLDER, glossary, near
from kimi_k3_npu.recipes.schema import Recipe, RecipeError, Role, Setting
from kimi_k3_npu.recipes.values import Rule, input_rule

BY_USER = "user"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What one process is started with. No value refers to an input any more."""

    recipe: Recipe
    role: Role
    #: The node's rank within the role.
    rank: int
    command: tuple[str, ...]
    flags: Mapping[str, Setting]
    environment: Mapping[str, Setting]
    inputs: Mapping[str, str]

    @property
    def options(self) -> EngineFlags:
        """The options that the engine's parser knows."""
        return load_flags(self.recipe.engine.flags)

    @property
    def flags_plain(self) -> dict[str, Any]:
        """The values of the flags, by flag."""
        return {name: setting.value for name, setting in self.flags.items()}

    def flag(self, name: str, default: Any = None) -> Any:
        """The value of a flag; True for one that has none."""
        return self.flags[name].value if name in self.flags else default

    def variable(self, name: str, default: str | None = None) -> str | None:
        return str(self.environment[name].value) if name in self.environment else default


def resolve(recipe: Recipe, role: str, rank: int, given: Mapping[str, str]) -> Launch:
    """The launch of the role's node `rank`.

    Args:
        given: By name: inputs of the recipe (and model_path, master_addr, or "<role>_addr" of another role), flags
            ("mem-fraction-static" or "--mem-fraction-static"; "off" takes one away, "on" adds one without a value),
            and environment variables ("off" takes one away).

    Raises:
        RecipeError: A name is none of these, a value is empty, an input cannot be what its name says (an address with
            a port, say), or an input that a value refers to is neither given nor has a default. What the engine has
            against the value of a flag is for the checks of `plan` to find.
    """
    inputs, flags, environment = _sort_out(recipe, given)
    chosen = recipe.roles[role]
    merged_flags, merged_environment = dict(chosen.flags), dict(chosen.environment)
    for part in chosen.per_node:
        if rank in part.nodes:
            merged_flags |= part.flags
            merged_environment |= part.environment
    for changes, settings in ((flags, merged_flags), (environment, merged_environment)):
        for name, value in changes.items():
            if value is None:
                settings.pop(name, None)
            else:
                settings[name] = Setting(value, "set by the user", BY_USER)
    known = _Inputs(recipe, role, rank, inputs)
    return Launch(
        recipe=recipe,
        role=chosen,
        rank=rank,
        command=tuple(known.fill(word) for word in chosen.command),
        flags=known.fill_all(merged_flags),
        environment=known.fill_all(merged_environment),
        inputs=known.used,
    )


def example_inputs(recipe: Recipe) -> dict[str, str]:
    """A value for everything that a recipe asks of the user: the examples that it gives itself."""
    addresses = {f"{role}_addr": f"192.168.{i}.10" for i, role in enumerate(recipe.roles)}
    asked = {name: entry.example for name, entry in recipe.inputs.items() if entry.default is None}
    return {"model_path": "/models/Kimi-K3", "master_addr": "192.168.0.10", **addresses, **asked}


def all_launches(recipe: Recipe, given: Mapping[str, str]) -> list[Launch]:
    """Every node of every role, and every role without nodes once."""
    return [
        resolve(recipe, role.name, rank, {"node_addr": f"192.168.{i}.{10 + rank}", **given})
        for i, role in enumerate(recipe.roles.values())
        for rank in range(max(1, role.nodes))
    ]


class _Inputs:
    """Fills in what values refer to, and remembers what was used."""

    def __init__(self, recipe: Recipe, role: str, rank: int, given: Mapping[str, str]) -> None:
        self.recipe = recipe
        self.used: dict[str, str] = {}
        self._known = {name: entry.default for name, entry in recipe.inputs.items() if entry.default is not None}
        first = recipe.serving_roles[0].name if recipe.serving_roles else role
        self._known |= given
        if "master_addr" in given:
            self._known.setdefault(f"{first}_addr", given["master_addr"])
        own = self._known.get(f"{role}_addr")
        if own is not None:
            self._known["master_addr"] = own
        else:
            self._known.pop("master_addr", None)
        self._known |= {"node_rank": str(rank), "nodes": str(recipe.roles[role].nodes)}
        if rank == 0 and own is not None:
            self._known.setdefault("node_addr", own)
        self._own_addr = f"{role}_addr" if role != first else "master_addr"

    def fill_all(self, settings: Mapping[str, Setting]) -> dict[str, Setting]:
        return {name: replace(setting, value=self.fill(setting.value)) for name, setting in settings.items()}

    def fill(self, value: Any) -> Any:
        if isinstance(value, str):
            return PLACEHOLDER.sub(self._in_place, value)
        if isinstance(value, list):
            return [self.fill(item) for item in value]
        if isinstance(value, Mapping):
            return {key: self.fill(item) for key, item in value.items()}
        return value

    def _in_place(self, match: re.Match[str]) -> str:
        """The input; an IPv6 address in brackets where a port or a path follows it."""
        found = self._one(match.group(1))
        followed = match.string[match.end() : match.end() + 1] in (":", "/")
        return before_port(found) if followed and input_rule(match.group(1)).kind == "address" else found

    def _one(self, name: str) -> str:
        if name not in self._known:
            asked = self._own_addr if name == "master_addr" else name
            entry = self.recipe.inputs.get(asked)
            what = entry.what if entry else _BUILT_IN_MEANING.get(asked, "address of the first node of that role")
            option = _option(asked)
            example = f" (such as {entry.example})" if entry else ""
            raise RecipeError(f"{self.recipe.name} asks for {asked}: {what}{example}; give it with {option}")
        self.used[name] = self._known[name]
        return self._known[name]


_BUILT_IN_MEANING = {
    "model_path": "folder of the checkpoint",
    "master_addr": "address of the launch's first node",
    "node_addr": "address of the node that the script is for",
}
_OPTIONS = {"model_path": "--model-path", "master_addr": "--master-addr"}


def _option(name: str) -> str:
    return _OPTIONS.get(name, f"--set {name}=...")


def _sort_out(recipe: Recipe, given: Mapping[str, str]) -> tuple[dict[str, str], dict[str, Any], dict[str, str | None]]:
    """What was given, as inputs, flags and variables; a value of None takes the flag or variable away."""
    inputs: dict[str, str] = {}
    flags: dict[str, Any] = {}
    environment: dict[str, str | None] = {}
    options = load_flags(recipe.engine.flags)
    addresses = {f"{role}_addr" for role in recipe.roles}
    names = {name for role in recipe.roles.values() for name in role.environment}
    for name, value in given.items():
        check_text(name, value)
        flag = name if name.startswith("--") else "--" + name.replace("_", "-")
        if name in recipe.inputs or name in BUILT_IN or name in addresses:
            inputs[name] = _input(name, value)
        elif flag in options or any(flag in role.flags for role in recipe.roles.values()):
            flags[options.canonical(flag)] = _flag_value(flag, value, options)
        elif name.isupper() and (name in names or name in glossary()["variables"] or name in options.variables):
            environment[name] = None if value == "off" else value
        else:
            known = [*recipe.inputs, *names, *options.names, *glossary()["variables"]]
            raise RecipeError(
                f"{name} is no input, variable or {recipe.engine.name} flag of {recipe.name}{near(name, known)}"
            )
    return inputs, flags, environment


def _flag_value(flag: str, text: str, options: EngineFlags) -> Any:
    if text == "off":
        return None
    if options.takes(flag) == "switch":
        if text not in ("on", "true", "1"):
            raise RecipeError(f"{flag} takes no value: set it on or off, not {text!r}")
        return True
    rule = options.option(flag).rule
    if options.takes(flag) == "values":
        return [_converted(rule, word) for word in text.split()]
    return _converted(rule, text)


def _converted(rule: Rule, text: str) -> Any:
    """The value; text that the rule refuses stays, for the checks to find."""
    try:
        return rule.read(text)
    except ValueError:
        return text


def check_text(name: str, text: str) -> None:
    """Raises RecipeError for what no value can be: nothing, or what a script cannot hold."""
    if not text.strip():
        raise RecipeError(f"{name} is empty, so it is not given; give it with {_option(name)}")
    if "\0" in text or text.encode(errors="replace") != text.encode(errors="surrogatepass"):
        raise RecipeError(f"{name} is {text!r}, which a script cannot hold: it must be UTF-8 without zero bytes")


def _input(name: str, text: str) -> str:
    try:
        return str(input_rule(name).read(text))
    except ValueError as error:
        raise RecipeError(f"{name} is {text!r}: {error}; give it with {_option(name)}") from None
