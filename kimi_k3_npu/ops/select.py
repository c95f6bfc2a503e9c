"""Choosing among the kernels of one operator: the first candidate that has no reason against the case at hand.

A case is a frozen dataclass of plain values (sizes, dtype, device), so a choice is a pure function: the planner, the
tests and the running kernel make the same one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kimi_k3_npu.errors import LaunchError

Case = TypeVar("Case")

#: (operator, kernel) -> launches in this process. Tests and the start-up log read it.
CHOSEN: Counter[tuple[str, str]] = Counter()

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate(Generic[Case]):
    """One kernel of an operator.

    Args:
        name: As printed, and as given to force it.
        refuse: From a case to the reason why this kernel cannot take it, or None.
        launch: The kernel, a function of the operator's tensors.
    """

    name: str
    refuse: Callable[[Case], str | None]
    launch: Callable[..., Any]


@dataclass(frozen=True)
class Choice:
    """The kernel for a case, and why the candidates before it were refused (name -> reason)."""

    op: str
    name: str
    refused: Mapping[str, str]
    launch: Callable[..., Any] = field(repr=False, compare=False)

    def run(self, *arguments: Any) -> Any:
        """Launch the kernel and record it in CHOSEN; the first launch of a kernel is logged with the reasons."""
        if not CHOSEN[self.op, self.name]:
            refused = "".join(f"; not {name}: {reason}" for name, reason in self.refused.items())
            _log.info("%s runs on %s%s", self.op, self.name, refused)
        CHOSEN[self.op, self.name] += 1
        return self.launch(*arguments)


def choose(op: str, candidates: Sequence[Candidate[Case]], case: Case, forced: str | None = None) -> Choice:
    """The first candidate that does not refuse `case`, or the one named `forced`.

    Raises:
        LaunchError: The forced candidate refuses the case or does not exist, or every candidate refuses it.
    """
    refused: dict[str, str] = {}
    for candidate in candidates:
        if forced is not None and candidate.name != forced:
            continue
        reason = candidate.refuse(case)
        if reason is None:
            return Choice(op, candidate.name, refused, candidate.launch)
        refused[candidate.name] = reason
    if not refused:
        raise LaunchError(f"{op} has no kernel {forced!r}; it has {', '.join(c.name for c in candidates)}")
    reasons = "; ".join(f"{name} refuses: {reason}" for name, reason in refused.items())
    raise LaunchError(f"no kernel for {op} with {case}: {reasons}")
