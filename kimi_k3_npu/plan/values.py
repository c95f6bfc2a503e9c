"""The values of a launch's flags and variables that nothing can be computed with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kimi_k3_npu.plan.finding import Finding
from kimi_k3_npu.recipes.engine_flags import EngineFlags
from kimi_k3_npu.recipes.launch import Launch
from kimi_k3_npu.recipes.reader import did_you_mean
from kimi_k3_npu.recipes.values import Rule, faults, stated_rules


def value_faults(launch: Launch) -> Iterator[Finding]:
    """The values that cannot be read, or are outside of what they can mean."""
    for flag, setting in launch.flags.items():
        if flag in launch.options:
            yield from _flag_faults(launch.options, flag, setting.value)
    for name, setting in launch.environment.items():
        rules = {key: Rule(kind or "text", range_) for key, (kind, range_) in stated_rules("variables").items()}
        for words in faults(name, setting.value, rules):
            yield Finding("error", "variable-value", words)


def _flag_faults(options: EngineFlags, flag: str, value: Any) -> Iterator[Finding]:
    takes = options.takes(flag)
    if (takes == "switch") != (value is True):
        rule = "takes no value" if takes == "switch" else "needs a value"
        yield Finding("error", "flag-value", f"{flag} {rule}", "see --help of the engine")
    elif takes != "switch":
        for words in options.faults(flag, value):
            fix = did_you_mean(str(value), options.choices(flag))
            yield Finding("error", "flag-value", words, fix)
