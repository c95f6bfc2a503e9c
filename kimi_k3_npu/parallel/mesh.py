"""The groups one rank belongs to, made from a layout: with process groups to run, without to be looked at."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from kimi_k3_npu import envs
from kimi_k3_npu.errors import LaunchError, LayoutError
from kimi_k3_npu.ops.device import current
from kimi_k3_npu.parallel.agreement import check_alike
from kimi_k3_npu.parallel.groups import Group
from kimi_k3_npu.parallel.layout import AxisName, ParallelLayout


@dataclass(frozen=True, eq=False)
class Mesh:
    """One rank's group along every axis of `layout`. `Mesh()` is a single rank."""

    layout: ParallelLayout = field(default_factory=ParallelLayout)
    stage: int = 0
    tp: Group = field(default_factory=lambda: Group("tp"))
    attn_tp: Group = field(default_factory=lambda: Group("attn_tp"))
    dp: Group = field(default_factory=lambda: Group("dp"))
    ep: Group = field(default_factory=lambda: Group("ep"))
    moe_tp: Group = field(default_factory=lambda: Group("moe_tp"))
    shared: Group = field(default_factory=lambda: Group("shared_experts_tp"))
    dense: Group = field(default_factory=lambda: Group("dense_mlp_tp"))
    vocab: Group = field(default_factory=lambda: Group("vocab"))
    #: The ranks of ep over a process group that carries nothing else; only with moe_dispatch = mc2.
    mc2: Group = field(default_factory=lambda: Group("mc2"))

    @classmethod
    def inspect(cls, layout: ParallelLayout, rank: int) -> Self:
        """The mesh of global `rank`, without transport: enough to build the rank's modules and read its weights."""
        stage, within = _place(layout, rank)
        groups = {}
        for name in get_args(AxisName):
            axis = layout.axis(name, within)
            groups[name] = Group(_TITLES.get(name, name), axis.rank, axis.size)
        if layout.moe_dispatch == "mc2":
            groups["mc2"] = replace(groups["ep"], name="mc2")
        return cls(layout, stage, **groups)

    @classmethod
    def distributed(cls, layout: ParallelLayout) -> Self:
        """The mesh of this process, with process groups. Every process of the world must call it, in the same order.

        Raises:
            LayoutError: The world is not there, or has another size than `layout`.
            LaunchError: Ranks differ in what decides whether MC2 takes a pass. Raised on every rank.
        """
        if not dist.is_initialized():
            raise LayoutError("torch.distributed is not initialised; call init_process_group before Mesh.distributed")
        world, rank = dist.get_world_size(), dist.get_rank()
        if world != layout.world:
            raise LayoutError(f"layout {layout} is for {layout.world} ranks, torch.distributed has {world}")
        if layout.moe_dispatch == "mc2":
            settings = {"HCCL_BUFFSIZE": envs.hccl_buffer_megabytes, "the NPU": lambda: current().soc}
            check_alike("dispatch=mc2", settings)
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        # Every process takes part in making every group, also of those it is no member of.
        for name in get_args(AxisName):
            for other in range(layout.world):
                members = _members(layout, name, other)
                if len(members) > 1 and members not in made:
                    made[members] = dist.new_group(list(members))
        mesh = cls.over(layout, rank, made, "torch.distributed")
        if layout.moe_dispatch == "mc2":
            own = [dist.new_group(list(range(first, first + layout.tp))) for first in range(0, layout.world, layout.tp)]
            mesh = replace(mesh, mc2=replace(mesh.mc2, process_group=own[mesh.stage]))
        return mesh

    @classmethod
    def over(
        cls,
        layout: ParallelLayout,
        rank: int,
        transports: Mapping[tuple[int, ...], dist.ProcessGroup],
        owner: str,
        *,
        unused: Collection[AxisName] = (),
    ) -> Self:
        """The mesh of global `rank` over process groups that `owner` has made, each found by the global ranks in it.

        Nothing travels along the axes in `unused`, which need none.

        Raises:
            LaunchError: There is no group of the ranks that an axis needs.
        """
        planned = cls.inspect(layout, rank)
        carried: dict[str, Any] = {}
        for name in get_args(AxisName):
            group: Group = getattr(planned, name)
            if group.size == 1 or name in unused:
                continue
            members = _members(layout, name, rank)
            if members not in transports:
                raise LaunchError(
                    f"{owner} has no process group of ranks {list(members)}, which {group.name} = {group.size} needs "
                    f"in layout {layout}"
                )
            carried[name] = replace(group, process_group=transports[members])
        return replace(planned, **carried)

    def all_replicas(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Every replica's rows, on every rank: x [counts[replica], ...] -> [sum(counts), ...]."""
        return self.dp.all_gather(x, counts)

    def sum_own_rows(self, partial: Tensor, counts: Sequence[int]) -> Tensor:
        """The sum over tp of partial results [sum(counts), ...], of which each rank keeps its replica's rows."""
        return self.attn_tp.all_reduce(self.dp.reduce_scatter(partial, counts))

    def token_counts(self, tokens: int, device: torch.device) -> list[int]:
        """Rows of every data-parallel replica in this pass: one small collective that all ranks of the stage enter.

        Raises LayoutError, on every rank alike, when ranks of one replica disagree about their rows.
        """
        everyone = self.tp.gather_value(tokens, device)
        replicas = [everyone[i : i + self.attn_tp.size] for i in range(0, self.tp.size, self.attn_tp.size)]
        check_equal_rows(replicas)
        return [replica[0] for replica in replicas]


def check_equal_rows(replicas: Sequence[Sequence[int]]) -> None:
    """Raise LayoutError unless the ranks of each replica have the same number of rows."""
    if wrong := {i: list(rows) for i, rows in enumerate(replicas) if len(set(rows)) > 1}:
        found = "; ".join(f"replica {i}: {rows}" for i, rows in wrong.items())
        raise LayoutError(f"ranks of one data-parallel replica must run the same tokens; their row counts: {found}")


_TITLES = {"shared": "shared_experts_tp", "dense": "dense_mlp_tp"}


def _members(layout: ParallelLayout, name: AxisName, rank: int) -> tuple[int, ...]:
    """The global ranks that form a group with global `rank` along the axis."""
    stage, within = _place(layout, rank)
    return tuple(stage * layout.tp + member for member in layout.axis(name, within).members)


def _place(layout: ParallelLayout, rank: int) -> tuple[int, int]:
    if not 0 <= rank < layout.world:
        raise LayoutError(f"rank {rank} is outside 0..{layout.world - 1} of layout {layout}")
    return divmod(rank, layout.tp)
