"""Operators whose kernel depends on the device, in the `torch.library` namespace `kimi_k3`: one record an operator.

    @operator("name(Tensor x, ...) -> Tensor")      the reference, made of ordinary torch operations
    def name(x, ...): ...

    @name.case(Case)                                 what of its arguments decides about kernels
    def _case(x, ...): return (...)

    @name.kernel("npu_name", refuse, needs)          a kernel of the NPU, from a case the reason against it, and what it
                                                     needs of torch_npu (`ops.schemas`)
    def fused(x, ...): ...

The reference is the operator's composite kernel: every device can run it, gradients flow through it and fake tensors
pass through it. On an NPU, PyTorch's dispatcher comes to `Op.npu`, which launches the first kernel, in the order of
their definition, that has no reason against the case at hand; the reference is the last. A case holds plain values
(sizes, dtypes, the device), so a choice is a pure function: plans, tests and running kernels make the same one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch

from kimi_k3_npu.errors import LaunchError
from kimi_k3_npu.ops.device import Device, current
from kimi_k3_npu.ops.limits import no_operator
from kimi_k3_npu.ops.schemas import NOTHING, Needs


class OnDevice(Protocol):
    """Something that is to be done on a device."""

    @property
    def device(self) -> Device: ...


Case = TypeVar("Case", bound=OnDevice)
Launch = TypeVar("Launch", bound=Callable[..., Any])

#: Every operator by its name.
OPS: dict[str, Op] = {}

#: (operator, kernel) -> launches in this process. Tests and the start-up log read it.
CHOSEN: Counter[tuple[str, str]] = Counter()

#: The name of the reference among the kernels of an NPU.
COMPOSED = "composed"

#: Cases of one operator whose choices are kept. A server meets fewer; a run over prompts of every length does not.
KEPT = 4096

_LIBRARY = torch.library.Library("kimi_k3", "DEF")
_log = logging.getLogger(__name__)


@dataclass
class Kernel(Generic[Case]):
    """One kernel of an operator.

    Args:
        name: As printed, and as given to force it.
        limits: From a case to the reason why no version of this kernel can take it, or None.
        launch: The kernel, a function of the operator's arguments.
        needs: What must be there of torch_npu.
    """

    name: str
    limits: Callable[[Case], str | None]
    launch: Callable[..., Any]
    needs: Needs = NOTHING

    def refuse(self, case: Case) -> str | None:
        """The reason why this kernel cannot take `case`, or None."""
        reason = no_operator(case.device, self.needs) if self.needs else None
        return reason or self.limits(case)


@dataclass(frozen=True)
class Choice:
    """The kernel for a case, and why the kernels before it were refused (name -> reason)."""

    op: str
    kernel: Kernel
    refused: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.kernel.name

    def run(self, *arguments: Any) -> Any:
        """Launch the kernel and record it in CHOSEN; the first launch of a kernel is logged with the reasons."""
        key = self.op, self.kernel.name
        if not CHOSEN[key]:
            refused = "".join(f"; not {name}: {reason}" for name, reason in self.refused.items())
            _log.info("%s runs on %s%s", *key, refused)
        CHOSEN[key] += 1
        return self.kernel.launch(*arguments)


def choose(op: str, kernels: Sequence[Kernel[Case]], case: Case, forced: str | None = None) -> Choice:
    """The first kernel that does not refuse `case`, or the one named `forced`.

    Raises:
        LaunchError: The forced kernel refuses the case or does not exist, or every kernel refuses it.
    """
    refused: dict[str, str] = {}
    for kernel in kernels:
        if forced is not None and kernel.name != forced:
            continue
        reason = kernel.refuse(case)
        if reason is None:
            return Choice(op, kernel, refused)
        refused[kernel.name] = reason
    if not refused:
        raise LaunchError(f"{op} has no kernel {forced!r}; it has {', '.join(kernel.name for kernel in kernels)}")
    reasons = "; ".join(f"{name} refuses: {reason}" for name, reason in refused.items())
    raise LaunchError(f"no kernel for {op} with {case}: {reasons}")


class Op(Generic[Case]):
    """One operator. Calling it runs the kernel of its tensors' device."""

    def __init__(self, schema: str, reference: Callable[..., Any]) -> None:
        self.name = schema.partition("(")[0]
        self.reference = reference
        self.__doc__ = reference.__doc__
        self._kernels: list[Kernel[Case]] = []
        self._is_complete = False
        self.npu_layout: Callable[..., Any] | None = None
        self._choices: dict[Device, dict[tuple, Choice]] = {}
        self._device: Device | None = None
        self._now: dict[tuple, Choice] = {}  # of _device
        self._forced: Callable[[Case], str | None] = lambda case: None
        _LIBRARY.define(schema)
        _LIBRARY.impl(self.name, reference, "CompositeImplicitAutograd")
        self.overload = getattr(torch.ops.kimi_k3, self.name).default
        OPS[self.name] = self

    def __call__(self, *arguments: Any) -> Any:
        return self.overload(*arguments)

    def case(self, build: Callable[..., Case]) -> Callable[[Callable[..., tuple | None]], Callable[..., tuple | None]]:
        """Declare that the decorated function takes from the arguments what decides about kernels.

        It returns a tuple, which with the device makes `build(*values, device)` the case, or None when there is nothing
        to launch. It runs in every call, so it makes no objects that a lookup does not need.
        """

        def bind(values: Callable[..., tuple | None]) -> Callable[..., tuple | None]:
            self._build, self._values = build, values
            _LIBRARY.impl(self.name, self.npu, "PrivateUse1")
            return values

        return bind

    def kernel(
        self, name: str, limits: Callable[[Case], str | None] | None = None, needs: Needs = NOTHING
    ) -> Callable[[Launch], Launch]:
        """Declare the decorated function a kernel, less preferred than those before it; arguments as of `Kernel`.

        Without `limits` it takes anything and stands for the reference on an NPU: no other may follow it.
        """

        def bind(launch: Launch) -> Launch:
            self.add(Kernel(name, limits or takes_anything, launch, needs))
            return launch

        return bind

    def add(self, kernel: Kernel[Case]) -> None:
        """Let `kernel` be the one to prefer least."""
        assert not self._is_complete, f"{self.name}: {kernel.name} comes after a kernel that takes anything"
        self._kernels.append(replace(kernel))
        self._is_complete = kernel.limits is takes_anything

    def layout(self, lay_out: Launch) -> Launch:
        """Declare that the decorated function is what the operator does to loaded weights on an NPU.

        It computes nothing that could be inexact; what it launches on the way are operators themselves.
        """
        self.npu_layout = lay_out
        _LIBRARY.impl(self.name, lay_out, "PrivateUse1")
        return lay_out

    def forced(self, which: Callable[[Case], str | None]) -> Callable[[Case], str | None]:
        """Declare that the decorated function names the kernel that a case must take; None leaves it to the order."""
        self._forced = which
        return which

    @property
    def kernels(self) -> tuple[Kernel[Case], ...]:
        """Those of an NPU, in order of preference; none if the operator is composed everywhere."""
        if not self._kernels or self._is_complete:
            return tuple(self._kernels)
        return (*self._kernels, Kernel(COMPOSED, takes_anything, self.reference))

    def npu(self, *arguments: Any) -> Any:
        """The operator on an NPU, whatever device its tensors are on: choose a kernel and launch it."""
        choice = self.choice(*arguments)
        return self.reference(*arguments) if choice is None else choice.run(*arguments)

    def choice(self, *arguments: Any) -> Choice | None:
        """The kernel that these arguments take on the current device, or None when there is nothing to launch.

        Raises:
            LaunchError: As `choose`.
        """
        device = current()
        if device is not self._device:
            self._device, self._now = device, self._choices.setdefault(device, {})
        values = self._values(*arguments)
        if values is None:
            return None
        choice = self._now.get(values)
        if choice is None:
            if len(self._now) >= KEPT:
                self._now.clear()
            choice = self._now[values] = self.choose(self._build(*values, device))
        return choice

    def choose(self, case: Case) -> Choice:
        """The kernel for a case. Raises LaunchError as the function `choose`."""
        return choose(self.name, self.kernels, case, self._forced(case))

    def forget(self) -> None:
        """Choose anew from now on: for tests, which change limits and variables while a process runs."""
        self._now, self._device = {}, None
        self._choices.clear()


def operator(schema: str) -> Callable[[Callable[..., Any]], Op]:
    """Declare the operator `schema` ("name(Tensor x, ...) -> Tensor") with the decorated function as its reference."""
    return lambda reference: Op(schema, reference)


def npu_operators() -> dict[str, Op]:
    """Those that have kernels of an NPU, by name, as far as their modules are imported."""
    return {name: op for name, op in sorted(OPS.items()) if op.kernels}


def takes_anything(case: object) -> None:
    """The limit of a composition of basic torch operators."""
