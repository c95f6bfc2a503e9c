"""SGLang's server arguments as a `ParallelLayout`, and SGLang's process groups as a `Mesh`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kimi_k3_npu import envs
from kimi_k3_npu.engines.groups import process_groups
from kimi_k3_npu.engines.options import check_all
from kimi_k3_npu.engines.sglang import options
from kimi_k3_npu.engines.sglang import symbols as engine
from kimi_k3_npu.parallel.layout import ParallelLayout
from kimi_k3_npu.parallel.mesh import Mesh

#: Groups of SGLang that our axes may run on; of two with the same ranks, the first.
COORDINATORS = ("tp_group", "attn_tp_group", "moe_ep_group", "moe_tp_group")


def engine_layout() -> ParallelLayout:
    """The layout that this launch asks for.

    Raises:
        LaunchError: An option that this model does not implement, and would otherwise ignore.
        LayoutError: The options contradict each other.
    """
    check_all(options.PARALLEL, options.value_of)
    parallel = engine.get_parallel()
    layout = ParallelLayout(
        tp=parallel.tp_size,
        dp=parallel.attn_dp_size,
        ep=parallel.moe_ep_size,
        pp=parallel.pp_size,
        moe_dispatch=options.DISPATCH[str(options.value_of(options.MOE_A2A_BACKEND))],
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
    transports = process_groups(getattr(parallel, name) for name in names)
    rank = parallel.pp_rank * layout.tp + parallel.tp_rank
    return EngineMesh.over(layout, rank, transports, engine.SGLANG.name, unused=["dp"])


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
