"""Counting what a pass over tensors without memory would do: arithmetic, bytes moved, the most that is live at once.

An operator of the namespace `kimi_k3` counts as one kernel that reads its inputs once and writes its results once; what
it is made of in the reference only counts as arithmetic. Everything else counts operation by operation.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
#: Operations that touch only the rows they name, of a table or pool that may be large.
_BY_ROW = {_aten.embedding, _aten.index, _aten.index_select, _aten.gather, _aten.index_copy_, _aten.index_add}
_FREE = {_aten.empty, _aten.new_empty, _aten.empty_like, _aten.detach, _aten.lift_fresh}


@dataclass
class Work:
    """What a kind of kernel does in a pass. Bytes are moved between the device's memory and its cores."""

    launches: int = 0
    flops: int = 0
    bytes: int = 0


@dataclass
class Count:
    """What a pass does. `weights` are the bytes of weights read at least once; `peak` the most bytes live at once."""

    kernels: dict[str, Work] = field(default_factory=dict)
    weights: int = 0
    peak: int = 0

    @property
    def flops(self) -> int:
        return sum(work.flops for work in self.kernels.values())

    @property
    def bytes(self) -> int:
        return sum(work.bytes for work in self.kernels.values())

    @property
    def launches(self) -> int:
        return sum(work.launches for work in self.kernels.values())

    def add(self, kernel: str, flops: int, moved: int, launches: int = 1) -> None:
        work = self.kernels.setdefault(kernel, Work())
        work.launches += launches
        work.flops += flops
        work.bytes += moved


class Accounted(NamedTuple):
    """What an operator would do: its result, arithmetic operations, bytes moved, and bytes of weights among them."""

    result: Any
    flops: int
    bytes: int
    weights: int


#: Takes an operator's arguments, instead of running the reference.
Account = Callable[..., Accounted]


class Meter:
    """Use as a context around a pass.

    Args:
        weights: Bytes that a weight takes, by its storage, where that is not the size of the tensor.
        accounts: Operators of `kimi_k3` that are not to be run but accounted for, by name.
        moved: Bytes that an operator moves, by name, where that is not its inputs and results.
        fused: Operators whose intermediate results never reach the device's memory.
    """

    def __init__(
        self,
        weights: Mapping[int, int] | None = None,
        accounts: Mapping[str, Account] | None = None,
        moved: Mapping[str, Callable[..., int]] | None = None,
        fused: Set[str] = frozenset(),
    ) -> None:
        self.count, self.fused = Count(), fused
        self.weights, self.accounts, self.moved = dict(weights or {}), dict(accounts or {}), dict(moved or {})
        self._read: set[int] = set()
        self._inside = ""
        self._live: Counter[int] = Counter()
        self._total = 0

    @contextmanager
    def __call__(self) -> Iterator[Count]:
        with _Kernels(self), _Operations(self):
            yield self.count

    def size(self, tensor: Tensor) -> int:
        """Bytes of what a tensor shows, or of the weight it is; the first read of a weight is remembered."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.weights:
            return tensor.numel() * tensor.element_size()
        share = tensor.numel() * tensor.element_size() / max(1, storage.nbytes())
        if key not in self._read:
            self._read.add(key)
            self.count.weights += self.weights[key]
        return math.ceil(self.weights[key] * share)

    def keep(self, tensor: Tensor) -> None:
        """`tensor` was there before and stays: it counts neither as a weight that is read nor as live."""
        storage = tensor.untyped_storage()
        self.weights[storage._cdata] = storage.nbytes()
        self._read.add(storage._cdata)

    def track(self, result: Any) -> None:
        """Follow the memory of new results until they are gone."""
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._live or key in self.weights:
                continue
            size = storage.nbytes()
            self._live[key] = size
            self._total += size
            self.count.peak = max(self.count.peak, self._total)
            weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self._total -= self._live.pop(key, 0)


class _Kernels(TorchFunctionMode):
    """Sees the operators of `kimi_k3` before they are taken apart."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        meter = self.meter
        if meter._inside or getattr(func, "namespace", None) != "kimi_k3":
            return func(*args, **kwargs)
        name = func.__name__.partition(".")[0]
        if account := meter.accounts.get(name):
            done = account(*args, **kwargs)
            meter.track(done.result)
            meter.count.add(name, done.flops, done.bytes)
            meter.count.weights += done.weights
            return done.result
        meter._inside = name
        try:
            result = func(*args, **kwargs)
        finally:
            meter._inside = ""
        meter.track(result)
        inner = meter.count.kernels.pop("inside", Work()).flops
        how = meter.moved.get(name)
        moved = how(*args, **kwargs) if how else sum(map(meter.size, _tensors((args, kwargs, result))))
        meter.count.add(name, inner, moved)
        return result


class _Operations(TorchDispatchMode):
    """Sees every operation that would reach a device."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        meter, packet = self.meter, func.overloadpacket
        if meter._inside not in meter.fused:
            meter.track(result)
        flops = _flops(packet, args, kwargs, result)
        if meter._inside:
            meter.count.add("inside", flops, 0, 0)
            return result
        if packet in _FREE or _is_view(func, args, result):
            return result
        meter.count.add(f"aten.{packet.__name__}", flops, _moved(meter, packet, args, result))
        return result


def _flops(packet: Any, args: Any, kwargs: Any, result: Any) -> int:
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    return 0


def _moved(meter: Meter, packet: Any, args: Any, result: Any) -> int:
    if packet not in _BY_ROW:
        return sum(map(meter.size, _tensors((args, result))))
    if packet in (_aten.index_copy_, _aten.index_add):
        return 2 * meter.size(args[3])
    return 2 * sum(tensor.numel() * tensor.element_size() for tensor in _tensors(result))


def _is_view(func: Any, args: Any, result: Any) -> bool:
    if func._schema.is_mutable:
        return False
    storages = {tensor.untyped_storage()._cdata for tensor in _tensors(args)}
    results = _tensors(result)
    return bool(results) and all(tensor.untyped_storage()._cdata in storages for tensor in results)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
