"""What a launch recipe says, as frozen data. `reader` makes it from a YAML file; `launch` fills it in for a node.

These classes are what pydantic validates a file by: their types, their defaults, and no key that they do not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, PlainValidator

from kimi_k3_npu.errors import KimiK3Error
from kimi_k3_npu.ops.device import Soc

Status = Literal["published", "derived", "unverified"]
EngineName = Literal["sglang", "vllm"]
CheckpointFormat = Literal["bf16", "mxfp4", "w4a8", "w4a8-attn8", "int4x2"]
#: A number or text, a list (several words after one flag), True for a flag without a value, or a mapping (JSON).
Value = str | int | float | bool | list[Any] | dict[str, Any]

DERIVED = "derived"


class RecipeError(KimiK3Error):
    """A recipe file, or what was asked of a recipe, is wrong."""


def _value(value: Any) -> Any:
    if value is None:
        raise ValueError("is nothing, expected a value")
    return value


def _in_full(raw: Any) -> Any:
    """A setting may be written as its value alone."""
    return raw if isinstance(raw, Mapping) and "value" in raw else {"value": raw}


def _with_example(raw: Any) -> Any:
    """A default is an example too."""
    return {"example": raw["default"], **raw} if isinstance(raw, Mapping) and "default" in raw else raw


def _number_as_text(raw: Any) -> Any:
    return str(raw) if type(raw) is int else raw


#: Text that may be written as a number.
Answer = Annotated[str, BeforeValidator(_number_as_text)]


@dataclass(frozen=True)
class OfFile:
    """A mapping of a recipe file: nothing in it is converted, and no other key may be there."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True)
class Setting(OfFile):
    """The value of a flag or of an environment variable. `source` is a key of the recipe's sources, or "derived".

    A file may leave out a source that is the recipe's own, and a reason that the glossary has.
    """

    value: Annotated[Value, PlainValidator(_value)]
    why: str = ""
    source: str = ""


Settings = Mapping[str, Annotated[Setting, BeforeValidator(_in_full)]]


@dataclass(frozen=True, kw_only=True)
class Hardware(OfFile):
    """Every node alike. A die is what an engine calls a device: an Atlas A3 card has two."""

    soc: Soc
    nodes: int
    dies_per_node: int
    #: As sold, in GiB; None where there is no device memory of its own.
    memory_gib_per_die: float | None = None
    #: CANN version that the kernel choices assume; None on a CPU.
    cann: str | None = None
    #: The chip in the hardware table of the plan ("910c", "950dt"); None: the table's first for the SoC.
    chip: str | None = None


@dataclass(frozen=True, kw_only=True)
class Engine(OfFile):
    """`flags` names the list in recipes/flags that the flags are checked against."""

    name: EngineName
    version: str
    flags: str


@dataclass(frozen=True, kw_only=True)
class Checkpoint(OfFile):
    """`target` and `draft` are names as published; where they lie on disk is asked when a script is rendered."""

    format: CheckpointFormat
    target: str
    draft: str | None = None


@dataclass(frozen=True, kw_only=True)
class Container(OfFile):
    """How the engine's image is started. None for `image` means that the source names none: the user gives it."""

    image: str | None = None
    options: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Input(OfFile):
    """Something that only the user knows. Without a default it must be given."""

    what: str
    example: Answer
    default: Answer | None = None


@dataclass(frozen=True, kw_only=True)
class NodeSettings(OfFile):
    """Flags and variables of some of a role's nodes, on top of the role's."""

    nodes: tuple[int, ...]
    flags: Settings = field(default_factory=dict)
    environment: Settings = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Role(OfFile):
    """What one kind of process does: serve, prefill, decode, or a router, which has no nodes of its own."""

    name: str
    nodes: int
    command: tuple[str, ...] = ()
    set_up: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()
    environment: Settings = field(default_factory=dict)
    flags: Settings = field(default_factory=dict)
    per_node: tuple[NodeSettings, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Measured(OfFile):
    """One published result: numbers by name (tpot_ms, accepted_tokens, gsm8k, ...), the conditions, the source."""

    what: str
    source: str
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Recipe(OfFile):
    """One launch. `known_problems` are the findings of the checks that the recipe itself admits to, with the reason."""

    name: str
    title: str
    status: Status
    source: str
    sources: Mapping[str, str]
    hardware: Hardware
    engine: Engine
    checkpoint: Checkpoint
    roles: Mapping[str, Role]
    container: Container | None = None
    inputs: Mapping[str, Annotated[Input, BeforeValidator(_with_example)]] = field(default_factory=dict)
    measured: tuple[Measured, ...] = ()
    notes: tuple[str, ...] = ()
    known_problems: Mapping[str, str] = field(default_factory=dict)
    #: Dotted path of what the source does not give -> where the value comes from.
    derived: Mapping[str, str] = field(default_factory=dict)

    @property
    def serving_roles(self) -> tuple[Role, ...]:
        """The roles that hold the model, in the order of their nodes."""
        return tuple(role for role in self.roles.values() if role.nodes)

    def place(self, node: int) -> tuple[Role, int]:
        """The role of a node of the launch, and the node's rank within it. Raises RecipeError for no node of it."""
        rank = node
        for role in self.serving_roles:
            if 0 <= rank < role.nodes:
                return role, rank
            rank -= role.nodes
        raise RecipeError(f"{self.name} has nodes 0..{self.hardware.nodes - 1}, not {node}")

    def first_node(self, role: str) -> int:
        """The launch's number of the first node of `role`."""
        before = list(self.roles)[: list(self.roles).index(role)]
        return sum(self.roles[name].nodes for name in before)
