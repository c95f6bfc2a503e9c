"""What every emulated operator shares: registration, the record of calls, and limits that can be lifted by name."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kimi_k3_npu.ops.device import current

#: Operator -> calls since the last `fresh()`.
calls: Counter[str] = Counter()

#: Operator -> the names of its limits on size and dtype, the only ones that `lifted` takes. Layouts, counts, contiguity
#: and ranges of values stay.
LIFTABLE: dict[str, frozenset[str]] = {}

#: Run by `fresh()`: forget what an operator keeps between calls.
FORGET: list[Callable[[], None]] = []

_KERNELS: dict[str, Callable] = {}
_lifts: dict[tuple[str, str], set[str]] = {}

# torch's ScalarType numbers, which a torch.dtype becomes in an `int` argument.
_SCALAR_TYPES = {1: torch.int8, 3: torch.int32, 5: torch.float16, 6: torch.float32, 15: torch.bfloat16}
_SCALAR_TYPES |= {23: torch.float8_e5m2, 24: torch.float8_e4m3fn}
# torch_npu's own numbers for what torch had no name for.
_SCALAR_TYPES |= {291: torch.float8_e5m2, 292: torch.float8_e4m3fn}
FLOAT8_E8M0 = 293
FLOAT4_E2M1 = 296


class Limits:
    """The limits of one operator: `limits(holds, message)` raises RuntimeError as the device would unless it holds."""

    def __init__(self, op: str, *liftable: str) -> None:
        self.op = op
        LIFTABLE[op] = frozenset(liftable)

    def __call__(self, holds: bool, message: str, lift: str | None = None) -> None:
        """`lift` names the limit in `LIFTABLE`; a lifted one is noted down where it would have been broken."""
        if holds:
            return
        if lift is not None and (self.op, lift) in _lifts:
            _lifts[self.op, lift].add(f"{self.op} {lift}: {message}")
            return
        raise RuntimeError(f"{self.op}: {message}")

    def soc(self, *allowed: str) -> None:
        """The operator exists only on these generations."""
        self(current().soc in allowed, f"does not exist on {current().soc}, only on {', '.join(allowed)}")

    def no(self, **options: object) -> None:
        """The options that are neither allowed in this use nor emulated must keep their defaults."""
        given = sorted(name for name, value in options.items() if value is not None)
        self(not given, f"not supported here: {', '.join(given)}")


def emulates(limits: Limits) -> Callable[[Callable], Callable]:
    """Make the decorated function the CPU kernel of the operator that `limits` is for, and record its calls."""

    def bind(kernel: Callable) -> Callable:
        @functools.wraps(kernel)
        def recorded(*args: object, **kwargs: object) -> object:
            calls[limits.op] += 1
            return kernel(*args, **kwargs)

        _KERNELS[limits.op] = recorded
        return recorded

    return bind


@functools.cache
def install() -> torch.library.Library:
    """Register every emulated operator for CPU tensors, once in a process. torch_npu must have been imported.

    Returns:
        The registrations; they last as long as the process.
    """
    library = torch.library.Library("npu", "IMPL")
    for op, kernel in _KERNELS.items():
        library.impl(op, kernel, "CPU")
    return library


def fresh() -> None:
    """Forget calls and whatever operators keep between calls, as a new process would."""
    calls.clear()
    for forget in FORGET:
        forget()


@contextmanager
def lifted(op: str, *limits: str) -> Iterator[set[str]]:
    """Do not enforce these limits of `op` inside the block; gives the set of what was broken meanwhile, in words.

    Raises:
        ValueError: A name is not a size or dtype limit of this operator.
    """
    if unknown := set(limits) - LIFTABLE[op]:
        raise ValueError(f"{op} has no liftable limit {sorted(unknown)}; it has {sorted(LIFTABLE[op])}")
    broken: set[str] = set()
    before = dict(_lifts)
    _lifts.update({(op, limit): broken for limit in limits})
    try:
        yield broken
    finally:
        _lifts.clear()
        _lifts.update(before)


def dtype_of(number: int | None, default: torch.dtype | None = None) -> torch.dtype | None:
    """The dtype that an `int? *_dtype` argument means."""
    return default if number is None else _SCALAR_TYPES[number]


def undefined(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor as the device leaves it where an operator promises nothing: NaN, or the largest integer."""
    if dtype.is_floating_point:
        return torch.full(shape, float("nan")).to(dtype)
    return torch.full(shape, torch.iinfo(dtype).max, dtype=dtype)
