"""Expert parallelism with an all-to-all: tokens travel to the ranks that hold their experts and come back.

The single-rank form is the same code over a group of one, where nothing travels.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from kimi_k3_npu.ops.device import current
from kimi_k3_npu.ops.mc2 import (
    MC2,
    Communicator,
    Exchange,
    ExpertsFunction,
    communicator_buffer,
    communicator_name,
    mc2,
)
from kimi_k3_npu.ops.op import Choice, Kernel, choose, takes_anything
from kimi_k3_npu.parallel.groups import Group


class ExpertDispatch(Protocol):
    """Runs `experts`, each rank's own, on the rows of all ranks."""

    def __call__(self, z: Tensor, weights: Tensor, ids: Tensor, experts: ExpertsFunction, largest: int) -> Tensor:
        """z [n, L], weights fp32 [n, k], global expert ids [n, k] -> the weighted sums [n, L].

        n may differ from rank to rank and be 0; every rank enters. `largest` is the largest n of all ranks, the same on
        all.
        """
        ...


class AllToAll:
    """Dispatch and combine by two all-to-alls with uneven counts, over any torch.distributed backend."""

    def __init__(self, group: Group, num_experts: int) -> None:
        self.group = group
        self.held = num_experts // group.size

    def __call__(self, z: Tensor, weights: Tensor, ids: Tensor, experts: ExpertsFunction, largest: int) -> Tensor:
        if not largest:  # no rank has a row
            return z
        top_k = ids.shape[1]
        order = ids.flatten().argsort(stable=True)  # pairs of token and expert, by expert and so by owner
        tokens, sorted_ids = order // top_k, ids.flatten()[order]
        sent = torch.bincount(sorted_ids // self.held, minlength=self.group.size)
        received = self.group.exchange_counts(sent)
        there, here = sent.tolist(), received.tolist()
        rows = self.group.all_to_all(z[tokens], there, here)
        row_ids = self.group.all_to_all(sorted_ids, there, here)
        # A row that has arrived is for one expert; its weight is applied where it came from, in fp32.
        results = experts(rows, torch.ones_like(row_ids, dtype=torch.float32).unsqueeze(1), row_ids.unsqueeze(1))
        returned = self.group.all_to_all(results, here, there)
        shares = weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(z, dtype=torch.float32).index_add(0, tokens, returned.float() * shares).to(z.dtype)


class Mc2:
    """The NPU's own dispatch and combine operators where they can take the pass, and `otherwise` where they cannot.

    `group` must have a process group that carries nothing else.
    """

    def __init__(self, group: Group, num_experts: int, otherwise: ExpertDispatch) -> None:
        self.group, self.num_experts = group, num_experts
        self._kernels = (
            replace(MC2, launch=self._mc2),
            Kernel[Exchange]("alltoall", takes_anything, otherwise),
        )

    def __call__(self, z: Tensor, weights: Tensor, ids: Tensor, experts: ExpertsFunction, largest: int) -> Tensor:
        if not largest:
            return z
        return self.choose(self.exchange(z, ids, largest)).run(z, weights, ids, experts, largest)

    def exchange(self, z: Tensor, ids: Tensor, largest: int) -> Exchange:
        """What a call with these arguments asks of the operators."""
        return Exchange(
            ranks=self.group.size,
            experts=self.num_experts,
            rows=largest,
            hidden=z.shape[1],
            top_k=ids.shape[1],
            dtype=z.dtype,
            buffer=communicator_buffer(),
            device=current(),
        )

    def choose(self, case: Exchange) -> Choice:
        """Which of the two takes `case`: the same on every rank, as every rank has the same case."""
        choice = choose("moe_dispatch", self._kernels, case)
        if choice.refused and (reason := MC2.refuse(replace(case, rows=1))):
            warnings.warn(f"dispatch=mc2 is never used here, alltoall takes its place: {reason}", stacklevel=2)
        return choice

    @cached_property
    def _communicator(self) -> Communicator:
        group = self.group
        return Communicator(communicator_name(group.transport), group.rank, group.size, self.num_experts)

    def _mc2(self, z: Tensor, weights: Tensor, ids: Tensor, experts: ExpertsFunction, largest: int) -> Tensor:
        return mc2(z, weights, ids, experts, largest, self._communicator)
