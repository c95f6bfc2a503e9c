"""SGLang's server arguments as a `ParallelLayout`, and SGLang's process groups as a `Mesh`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, get_args

from torch import Tensor

from kimi_k3_npu import envs
from kimi_k3_npu.engines.sglang import symbols as engine
from kimi_k3_npu.errors import LaunchError
from kimi_k3_npu.parallel.groups import Group
from kimi_k3_npu.parallel.layout import AxisName, Dispatch, ParallelLayout
from kimi_k3_npu.parallel.mesh import Mesh

#: Our dispatch for each `--moe-a2a-backend` that has one.
DISPATCH: dict[str, Dispatch] = {"none": "gather", "deepep": "alltoall"}

#: Groups of SGLang that our axes may run on; of two with the same ranks, the first.
COORDINATORS = ("tp_group", "attn_tp_group", "moe_ep_group", "moe_tp_group")


def engine_layout() -> ParallelLayout:
    """The layout that this launch asks for.

    Raises:
        LaunchError: An option that this model does not implement, and would otherwise ignore.
        LayoutError: The options contradict each other.
    """
    parallel, execution = engine.get_parallel(), engine.get_exec()
    moe = execution.moe
    backend = str(getattr(moe.moe_a2a_backend, "value", moe.moe_a2a_backend))
    if backend not in DISPATCH:
        raise LaunchError(f"--moe-a2a-backend {backend} is not implemented here; choices: {', '.join(DISPATCH)}")
    for option, value, neutral in (
        ("--attn-cp-size", parallel.attn_cp_size, 1),
        ("--dcp-size", parallel.dcp_size, 1),
        ("--moe-data-parallel-size", parallel.moe_dp_size, 1),
        ("--moe-dense-tp-size", parallel.moe_dense_tp_size, None),
        ("--ep-num-redundant-experts", moe.ep_num_redundant_experts, 0),
        ("--enable-eplb", moe.enable_eplb, False),
        ("--init-expert-location", moe.init_expert_location, "trivial"),
        ("--enable-two-batch-overlap", execution.overlap.enable_two_batch_overlap, False),
        ("--cpu-offload-gb", execution.offload.cpu_offload_gb, 0),
        ("--offload-group-size", execution.offload.offload_group_size, -1),
        ("--enable-lora", bool(engine.get_lora().enable_lora), False),
    ):
        if value != neutral:
            raise LaunchError(f"{option} {value} is not implemented by this model; leave it out")
    layout = ParallelLayout(
        tp=parallel.tp_size,
        dp=parallel.attn_dp_size,
        ep=parallel.moe_ep_size,
        pp=parallel.pp_size,
        moe_dispatch=DISPATCH[backend],
        enable_shared_experts_attn_tp=parallel.enable_shared_experts_attn_tp,
        shared_experts_tp_size=parallel.shared_experts_tp_size,
        enable_dense_mlp_attn_tp=parallel.enable_dense_mlp_attn_tp,
        enable_dp_lm_head=parallel.enable_dp_lm_head,
    )
    given = {name for name in ("enable_shared_experts_attn_tp", "enable_dense_mlp_attn_tp") if getattr(layout, name)}
    return layout.with_former_variables(envs.former(), given=frozenset(given))


class EngineMesh(Mesh):
    """Rows travel between replicas over SGLang's tp group: SGLang has no group along dp.

    Each rank of a replica brings its share of the replica's rows; in rank order these are all rows in order.
    """

    def all_replicas(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        if self.dp.size == 1:
            return x
        return self.tp.all_gather(x[self.attn_tp.bounds(self._own(counts))], self._shares(counts))

    def sum_own_rows(self, partial: Tensor, counts: Sequence[int]) -> Tensor:
        if self.dp.size == 1:
            return self.tp.all_reduce(partial)
        return self.attn_tp.all_gather(self.tp.reduce_scatter(partial, self._shares(counts)), self._own(counts))

    def _own(self, counts: Sequence[int]) -> list[int]:
        return self.attn_tp.chunks(counts[self.dp.rank])

    def _shares(self, counts: Sequence[int]) -> list[int]:
        return [share for rows in counts for share in self.attn_tp.chunks(rows)]


def engine_mesh(layout: ParallelLayout) -> EngineMesh:
    """The groups of this process, over SGLang's own process groups: no communicator is added to them."""
    parallel = engine.get_parallel()
    names = [*COORDINATORS, "shared_experts_tp_group"] if layout.shared_experts_tp_size else COORDINATORS
    transports: dict[tuple[int, ...], Any] = {}
    for coordinator in (getattr(parallel, name) for name in names):
        transports.setdefault(tuple(coordinator.ranks), coordinator.device_group)
    rank = parallel.pp_rank * layout.tp + parallel.tp_rank
    planned = Mesh.inspect(layout, rank)
    groups: dict[str, Any] = {"layout": layout, "stage": planned.stage}
    for axis in get_args(AxisName):
        group: Group = getattr(planned, axis)
        members = tuple(planned.stage * layout.tp + member for member in layout.axis(axis, parallel.tp_rank).members)
        if group.size > 1 and axis != "dp":
            if members not in transports:
                raise LaunchError(
                    f"SGLang has no process group of ranks {list(members)}, which {group.name} = {group.size} needs "
                    f"in layout {layout}"
                )
            group = dataclasses.replace(group, process_group=transports[members])
        groups[axis] = group
    return EngineMesh(**groups)


def token_counts(forward_batch: Any, tokens: int, layout: ParallelLayout, replica: int) -> list[int]:
    """Rows of every data-parallel replica in this pass, known to SGLang on the host."""
    if layout.dp == 1:
        return [tokens]
    counts = forward_batch.global_num_tokens_cpu
    if counts is None or len(counts) != layout.dp or counts[replica] != tokens:
        raise RuntimeError(
            f"SGLang's row counts {counts} do not describe this pass: {tokens} rows on replica {replica} of {layout.dp}"
        )
    return list(counts)
