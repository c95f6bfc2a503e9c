"""Checks of single flags and variables: the engine knows them, and reads their values."""

from __future__ import annotations

from collections.abc import Iterator

from kimi_k3_npu.plan.finding import Finding
from kimi_k3_npu.plan.subject import Subject
from kimi_k3_npu.recipes.reader import did_you_mean, glossary
from kimi_k3_npu.recipes.serving import runs_own_model


def flags(subject: Subject) -> Iterator[Finding]:
    """Every flag is one that the engine's parser knows."""
    launch, options = subject.launch, subject.launch.options
    former = glossary()["former"]["flags"][subject.engine]
    for flag in launch.flags:
        if flag in former:
            yield Finding("error", "dead-flag", f"{flag} has gone from {subject.engine}", f"use {former[flag]}")
        elif flag not in options:
            words = f"{options.name} does not know {flag}"
            yield Finding("error", "unknown-flag", words, did_you_mean(flag, options.names))


def values(subject: Subject) -> Iterator[Finding]:
    """Every flag and variable has a value that its reader takes."""
    yield from subject.value_faults


def variables(subject: Subject) -> Iterator[Finding]:
    """No variable is one that nobody reads."""
    launch, options = subject.launch, subject.launch.options
    former, known = glossary()["former"]["variables"], glossary()["variables"]
    for name in launch.environment:
        if name in former:
            yield from _former_variable(subject, name, former[name])
        elif _belongs_to(subject.engine, name) and name not in options.variables:
            words = f"{name} does not occur in {options.name}: nobody reads it"
            yield Finding("warning", "dead-variable", words, did_you_mean(name, options.variables))
        elif name.startswith(("HCCL_", "ASCEND_", "DEEPEP_")) and name not in known:
            words = f"{name} is not a variable that this package knows"
            yield Finding("warning", "unknown-variable", words, did_you_mean(name, known))


def _former_variable(subject: Subject, name: str, flag: str | None) -> Iterator[Finding]:
    release = subject.launch.recipe.engine.flags
    if flag is None:
        yield Finding("warning", "dead-variable", f"{name} is not read by {release}", "leave it out")
    elif flag in subject.launch.flags:
        yield Finding(
            "warning", "dead-variable", f"{name} is not read by {release}", f"{flag} does it; leave {name} out"
        )
    elif runs_own_model(subject.launch):
        yield Finding(
            "warning", "dead-variable", f"{name} is a former name, which only this package reads", f"use {flag}"
        )
    else:
        yield Finding("error", "dead-variable", f"{name} is not read by {release}, so nothing is split", f"use {flag}")


def _belongs_to(engine: str, name: str) -> bool:
    if engine == "sglang":
        return name.startswith(("SGLANG_", "SGL_"))
    return name.startswith("VLLM_") and not name.startswith("VLLM_ASCEND_")
