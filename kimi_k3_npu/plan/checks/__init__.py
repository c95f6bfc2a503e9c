"""What can be told to go wrong with a launch before it is made. A check is a function from a launch to findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kimi_k3_npu.plan.checks import dispatch, engine, experts, layout, passes, room, settings
from kimi_k3_npu.plan.finding import Finding
from kimi_k3_npu.plan.subject import Subject

Check = Callable[[Subject], Iterator[Finding]]

#: Of single settings: these compute with no value.
SETTINGS: tuple[Check, ...] = (settings.flags, settings.values, settings.variables)
#: In the order in which they report.
CHECKS: tuple[Check, ...] = (
    *SETTINGS,
    layout.layout,
    layout.devices,
    experts.number,
    experts.function,
    experts.expert_format,
    dispatch.mc2,
    dispatch.deepep,
    passes.kernels,
    passes.graphs,
    room.fit,
    room.million,
    engine.aiv,
    engine.verification,
    room.draft,
    engine.transfer,
)


def check_launch(subject: Subject) -> list[Finding]:
    """Everything that the checks find. What the recipe itself admits to is a note.

    Where a value cannot be read, no check goes on that would compute with it.
    """
    known = subject.launch.recipe.known_problems
    checks = SETTINGS if subject.value_faults else CHECKS
    return [
        Finding("note", found.check, found.text, f"known: {known[found.check]}") if found.check in known else found
        for one in checks
        for found in one(subject)
    ]
