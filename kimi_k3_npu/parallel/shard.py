"""Shard records: which piece of which published tensor fills which part of a parameter on this rank.

The record is made where the parameter is allocated and is read by the loader (what to read from disk, where to put
it), by the planner (bytes per rank) and by the export. A layer writes its sharding down once, here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from kimi_k3_npu.ops.nz import overwrite
from kimi_k3_npu.parallel.groups import Group

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Piece:
    """A published tensor of `shape`: this rank reads `source` of it and stores it at `target` of the parameter.

    `dealt` is over how many ranks tensors like this one are dealt out, each to one of them, as experts are.
    """

    shape: tuple[int, ...]
    source: Slices = ()
    target: Slices = ()
    dealt: int = 1

    @cached_property
    def numel(self) -> int:
        """Elements that this rank keeps."""
        return math.prod(len(range(*part.indices(n))) for n, part in self._read())

    @cached_property
    def is_replicated(self) -> bool:
        """Whether every rank keeps all of the tensor."""
        return self.dealt == 1 and all(part.indices(n) == (0, n, 1) for n, part in self._read())

    def _read(self) -> Iterator[tuple[int, slice]]:
        source = self.source + (slice(None),) * (len(self.shape) - len(self.source))
        return zip(self.shape, source, strict=True)


def whole(*shape: int, target: Slices = ()) -> Piece:
    """The rank keeps all of the tensor (replicated)."""
    return Piece(shape, (), target)


def split(shape: tuple[int, ...], dim: int, group: Group, what: str, target: Slices = ()) -> Piece:
    """The rank keeps its share of dimension `dim`. Raises LayoutError when the group does not divide it."""
    part = group.part(shape[dim], what)
    return Piece(shape, (slice(None),) * dim + (part,), target)


class Layer(nn.Module):
    """A module that knows, for each parameter it allocates, the published pieces that fill it."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: dict[str, Mapping[str, Piece]] = {}
        # Of parameters that were laid out: how they are published, and during a load, what it will write over.
        self._published: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._former: dict[str, nn.Parameter] = {}

    def allocate(
        self, name: str, shape: tuple[int, ...], pieces: Piece | Mapping[str, Piece], dtype: torch.dtype | None = None
    ) -> nn.Parameter:
        """Register the parameter `name`, uninitialised. One piece needs no name; several are keyed by published
        name."""
        parameter = nn.Parameter(
            torch.empty(shape, dtype=dtype), requires_grad=(dtype or torch.float32).is_floating_point
        )
        self.register_parameter(name, parameter)
        self._pieces[name] = {"": pieces} if isinstance(pieces, Piece) else pieces
        return parameter

    def pieces(self, parameter: str) -> Mapping[str, Piece]:
        """The published pieces of one parameter of this layer, by name ("" when there is only one)."""
        return self._pieces[parameter]

    def lay_out(self, name: str, values: Tensor) -> None:
        """From now on keep the parameter `name` as `values`: the same, as a device takes them. It may be itself.

        After a reload they go where the former ones lie, if the device can do that: captured graphs read them there.
        """
        parameter = self.get_parameter(name)
        if values is parameter:
            return
        self._published.setdefault(name, (parameter.shape, parameter.dtype))
        former = self._former.pop(name, None)
        if former is None or not overwrite(former, values):
            former = nn.Parameter(values, requires_grad=False)
        self.register_parameter(name, former)

    @property
    def is_laid_out(self) -> bool:
        """Whether a device has been given some parameter otherwise than as it was published."""
        return bool(self._published)

    def is_as_published(self, name: str) -> bool:
        """Whether the parameter `name` holds what was loaded, and not what a device was given in its place."""
        return name not in self._published or name in self._former

    def restore(self) -> None:
        """Give parameters that were laid out otherwise their published shapes again, for a load to fill.

        What was laid out stays where it is until `prepare` lays out the new values, and is then written over.
        """
        for name, (shape, dtype) in self._published.items():
            if name not in self._former:  # a load that failed has left it published already
                former = self._former[name] = self.get_parameter(name)
                empty = torch.empty(shape, dtype=dtype, device=former.device)
                self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    def prepare(self) -> None:
        """Derive what is computed once from loaded weights. Called after every load; the default derives nothing."""


def layers(model: nn.Module) -> Iterator[tuple[str, Layer]]:
    """Every Layer of `model` with its dotted path."""
    for path, module in model.named_modules():
        if isinstance(module, Layer):
            yield path, module
