"""Expert parallelism with an all-to-all: tokens travel to the ranks that hold their experts and come back.

The single-rank form is the same code over a group of one, where nothing travels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from kimi_k3_npu.parallel.groups import Group

#: rows [n, L], weights fp32 [n, k], expert ids [n, k] -> [n, L], summed over the experts held by this rank.
ExpertsFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


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
