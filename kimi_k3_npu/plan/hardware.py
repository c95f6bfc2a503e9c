"""What the chips can do at most, each number with where it was published, and the least time a pass can take on them.

A number that no public source gives is None: the user gives it, and the error names an example.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from kimi_k3_npu.errors import LaunchError
from kimi_k3_npu.ops.device import Soc
from kimi_k3_npu.plan.dry_run import Pass

CLOUD_MATRIX = "Serving Large Language Models on Huawei CloudMatrix384, arXiv:2506.12708, section 3.3"
ROADMAP = "Huawei Connect 2025, Ascend roadmap (18 September 2025)"
NOTHING = "not published"


@dataclass(frozen=True)
class Number:
    """A figure of one die, in base units (bytes or operations per second), and its source."""

    value: float | None
    source: str


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One die. `link` is what it can send to other dies at the same time, one way."""

    name: str
    soc: Soc
    memory_bandwidth: Number
    bf16: Number
    int8: Number
    link: Number


CHIPS: tuple[Chip, ...] = (
    Chip(
        name="910c",
        soc="a3",
        memory_bandwidth=Number(1.6e12, CLOUD_MATRIX),
        bf16=Number(376e12, CLOUD_MATRIX),
        int8=Number(752e12, CLOUD_MATRIX),
        link=Number(196e9, f"{CLOUD_MATRIX} (UB plane, within one supernode; 25e9 over RDMA beyond it)"),
    ),
    Chip(
        name="950dt",
        soc="a5",
        memory_bandwidth=Number(4.0e12, ROADMAP),
        bf16=Number(None, NOTHING),
        int8=Number(None, NOTHING),
        link=Number(1.0e12, f"{ROADMAP}: 2 TB/s, taken as both ways together"),
    ),
    Chip(
        name="950pr",
        soc="a5",
        memory_bandwidth=Number(1.6e12, ROADMAP),
        bf16=Number(None, NOTHING),
        int8=Number(None, NOTHING),
        link=Number(1.0e12, f"{ROADMAP}: 2 TB/s, taken as both ways together"),
    ),
    Chip(
        name="910b",
        soc="a2",
        memory_bandwidth=Number(None, NOTHING),
        bf16=Number(None, NOTHING),
        int8=Number(None, NOTHING),
        link=Number(None, NOTHING),
    ),
)

#: For each figure: the option that gives it, its unit in base units, and an example for the error.
OPTIONS = {
    "memory_bandwidth": ("--memory-tbps", 1e12, "1.6"),
    "bf16": ("--bf16-tflops", 1e12, "350"),
    "link": ("--link-gbps", 1e9, "25, gigabytes each way"),
}


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The least seconds of a pass, reading memory, computing and sending. They may overlap, so the largest binds."""

    memory: float
    compute: float
    link: float
    sources: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return max(self.memory, self.compute, self.link)

    @property
    def one_after_the_other(self) -> float:
        return self.memory + self.compute + self.link


def chip(soc: str, name: str | None, given: dict[str, float | None]) -> Chip:
    """The chip `name` (None: the first of `soc`), with figures that the user gives, by their names in OPTIONS.

    Raises:
        LaunchError: There is no such chip, or none for a CPU.
    """
    found = [one for one in CHIPS if one.soc == soc and name in (None, one.name)]
    if not found:
        known = ", ".join(f"{one.name} ({one.soc})" for one in CHIPS)
        raise LaunchError(f"no chip {name or ''} for soc {soc} in the hardware table; it has {known}")
    changes: dict[str, Any] = {
        field: Number(value * OPTIONS[field][1], "given by the user")
        for field, value in given.items()
        if value is not None
    }
    return replace(found[0], **changes)


def missing(of: Chip) -> list[str]:
    """The options for the figures that a bound needs and nobody has given, with an example each."""
    return [
        f"{option} (such as {example})"
        for name, (option, _, example) in OPTIONS.items()
        if getattr(of, name).value is None
    ]


def bound(of: Chip, done: Pass) -> Bound:
    """The bound of a pass: weights that are used are read once, caches once, and all arithmetic runs at the best rate.

    Raises:
        LaunchError: A figure is not known; names the options that give it.
    """
    if options := missing(of):
        raise LaunchError(f"{of.name}: no public source for every figure; give {', '.join(options)}")
    compute = of.bf16.value if of.int8.value is None else max(of.bf16.value or 0, of.int8.value)
    return Bound(
        memory=done.compulsory / (of.memory_bandwidth.value or math.inf),
        compute=done.count.flops / (compute or math.inf),
        link=done.sent / (of.link.value or math.inf),
        sources=tuple(dict.fromkeys(getattr(of, field.name).source for field in fields(of) if field.name in OPTIONS)),
    )
