"""Checks of how the model is split over the ranks."""

from __future__ import annotations

from collections.abc import Iterator

from kimi_k3_npu.errors import IgnoredOptionError
from kimi_k3_npu.plan.finding import Finding
from kimi_k3_npu.plan.subject import Subject


def layout(subject: Subject) -> Iterator[Finding]:
    """The flags make a layout that can split this model, and every option has an effect."""
    if subject.layout_error:
        ignored = isinstance(subject.layout_error, IgnoredOptionError)
        fix = "use --moe-a2a-backend deepep, or leave the option out" if ignored else ""
        yield Finding("error", "option-ignored" if ignored else "layout", str(subject.layout_error), fix)
    elif subject.serving and subject.engine == "sglang":
        for note in subject.serving.layout.notes():
            yield Finding("warning", "option-ignored", note, "leave the option out")


def devices(subject: Subject) -> Iterator[Finding]:
    """The ranks are as many as the role's dies."""
    if subject.serving:
        dies = subject.launch.role.nodes * subject.launch.recipe.hardware.dies_per_node
        ranks = subject.serving.layout.world
        if ranks != dies:
            words = f"the flags make {ranks} ranks, {subject.launch.role.name} has {dies} dies"
            yield Finding("error", "devices", words, "change the sizes of the layout, or the number of nodes")
