"""Expert dispatch and combine as two NPU operators that communicate themselves ("MC2"), for few rows a rank.

Sources of the limits: torch_npu's pages on npu_moe_distribute_dispatch_v2 and _combine_v2, and CANN's on
aclnnMoeDistributeDispatchV3; where they differ, the stricter one is here. The operators want a communicator that
carries nothing else, with a buffer (HCCL_BUFFSIZE) that holds what every rank may receive. Neither page knows the A5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kimi_k3_npu import envs
from kimi_k3_npu.ops import schemas
from kimi_k3_npu.ops.device import Device, Soc, current
from kimi_k3_npu.ops.grouped import owners
from kimi_k3_npu.ops.limits import HALVES, wrong_dtype
from kimi_k3_npu.ops.op import Kernel

#: rows [n, L], weights fp32 [n, k], expert ids [n, k] -> [n, L], summed over the experts held by this rank.
ExpertsFunction = Callable[[Tensor, Tensor, Tensor], Tensor]

MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What the operators take on one generation of NPU."""

    ranks: frozenset[int]
    experts: int
    experts_per_rank: int
    hidden: range
    rows: int
    top_k: int = 16
    dtypes: tuple[torch.dtype, ...] = HALVES
    #: How rows travel. The default of the A2 would depend on the environment of the process.
    algorithm: str = ""
    #: Whether the weights travel with the rows.
    sends_weights: bool = False


LIMITS: dict[Soc, Limits] = {
    "a2": Limits(
        frozenset((16, 32, 64, 128, 256)), 512, 24, range(32, 7169, 32), 256, algorithm="fullmesh", sends_weights=True
    ),
    "a3": Limits(frozenset(range(2, 769)), 1024, 1024, range(1024, 8193), 512),
}


@dataclass(frozen=True)
class Exchange:
    """One dispatch: at most `rows` rows on any rank, `experts` in all, over a communicator with `buffer` bytes."""

    ranks: int
    experts: int
    rows: int
    hidden: int
    top_k: int
    dtype: torch.dtype
    buffer: int
    device: Device


def refuse_mc2(case: Exchange) -> str | None:
    """Why the operators cannot do `case`, or None."""
    if case.device.soc == "cpu":
        return "there is no NPU"
    limits = LIMITS.get(case.device.soc)
    if limits is None:
        return f"its limits on {case.device.soc} are not known, only on {' and '.join(LIMITS)}"
    return _refuse_shape(case, limits) or _refuse_rows(case, limits)


def _refuse_shape(case: Exchange, limits: Limits) -> str | None:
    if case.ranks not in limits.ranks:
        return f"ep = {case.ranks}, must be {_in_words(limits.ranks)}"
    held, rest = divmod(case.experts, case.ranks)
    if rest or not 1 <= case.experts <= limits.experts:
        return f"{case.experts} experts, must be a multiple of ep = {case.ranks} up to {limits.experts}"
    if held > limits.experts_per_rank:
        return f"{held} experts a rank, must be at most {limits.experts_per_rank}"
    if case.hidden not in limits.hidden:
        multiple = f" in steps of {limits.hidden.step}" if limits.hidden.step > 1 else ""
        return f"rows of {case.hidden}, must be in {limits.hidden[0]}..{limits.hidden[-1]}{multiple}"
    if not 1 <= case.top_k <= min(limits.top_k, case.experts):
        return f"{case.top_k} experts a token, must be in 1..{min(limits.top_k, case.experts)}"
    return wrong_dtype("the row dtype", case.dtype, limits.dtypes)


def _refuse_rows(case: Exchange, limits: Limits) -> str | None:
    if not 1 <= case.rows <= limits.rows:
        return f"{case.rows} rows on a rank, must be in 1..{limits.rows}"
    if (needed := buffer_bytes(case)) > case.buffer:
        return (
            f"{case.rows} rows on a rank need HCCL_BUFFSIZE={-(-needed // MEGABYTE)}, "
            f"the communicator has {case.buffer // MEGABYTE}"
        )
    return None


def _in_words(numbers: frozenset[int]) -> str:
    low, high = min(numbers), max(numbers)
    if len(numbers) == high - low + 1:
        return f"in {low}..{high}"
    return f"one of {', '.join(map(str, sorted(numbers)))}"


def buffer_bytes(case: Exchange) -> int:
    """What the communicator's buffer must hold: twice the rows that may arrive, and on an A3 those that come back."""
    held = case.experts // case.ranks
    if case.device.soc == "a2":
        return 2 * (case.rows * case.ranks * min(held, case.top_k) * case.hidden * 2 + 2 * MEGABYTE)
    row = _align(2 * case.hidden, 32) + 64
    arriving = held * case.rows * case.ranks * _align(row, 512)
    return 2 * (arriving + (case.top_k + 1) * case.rows * _align(2 * case.hidden, 512))


def _align(size: int, to: int) -> int:
    return -(-size // to) * to


def communicator_buffer() -> int:
    """Bytes of a communicator's buffer: CANN's variable HCCL_BUFFSIZE, which must be the same on all ranks."""
    return envs.hccl_buffer_megabytes() * MEGABYTE


def communicator_name(process_group: dist.ProcessGroup) -> str:
    """The name by which the operators find the communicator of `process_group`, which is made if it is not there yet.

    Making it is a collective: the first call must come on every rank, and outside of graph capture.
    """
    backend: Any = process_group._get_backend(torch.device("npu"))
    return backend.get_hccl_comm_name(dist.get_rank())


@dataclass(frozen=True)
class Communicator:
    """This rank's place in the communicator `name`, over which `experts` experts are dealt out."""

    name: str
    rank: int
    ranks: int
    experts: int


def mc2(z: Tensor, weights: Tensor, ids: Tensor, experts: ExpertsFunction, largest: int, of: Communicator) -> Tensor:
    """Run `experts`, each rank's own, on the rows of all ranks; they may have unequal numbers of rows, up to `largest`.

    z [n, L], weights fp32 [n, k], global expert ids [n, k], different ones for one row -> the weighted sums [n, L].
    """
    n, top_k = ids.shape
    if not n:  # no rank may come without a row: this one sends zeros, which come back with weight 0
        z, weights = z.new_zeros(1, z.shape[1]), weights.new_zeros(1, top_k)
        ids = torch.arange(top_k, device=ids.device).unsqueeze(0)
    ids = ids.to(torch.int32)
    limits = LIMITS[current().soc]
    common = {
        "group_ep": of.name,
        "ep_world_size": of.ranks,
        "ep_rank_id": of.rank,
        "moe_expert_num": of.experts,
        "global_bs": largest * of.ranks,
        "comm_alg": limits.algorithm,
    }
    sent = {"expert_scales": weights} if limits.sends_weights else {}
    rows, _, handle, counts, received, _, arrived = torch.ops.npu.npu_moe_distribute_dispatch_v2(
        z, ids, **common, **sent
    )
    # There is room for all rows that might have come; those past the last that did hold anything.
    row_ids = owners(counts, rows.shape[0], of.rank * (of.experts // of.ranks))
    results = experts(rows, torch.ones_like(row_ids, dtype=torch.float32), row_ids)
    back = {"expand_scales": arrived} if limits.sends_weights else {}
    combined = torch.ops.npu.npu_moe_distribute_combine_v2(results, ids, handle, received, weights, **common, **back)
    return combined.narrow(0, 0, n)


#: Both operators as a kernel. It is an alternative to other ways of carrying rows, which are no operators of torch.
MC2: Kernel[Exchange] = Kernel("mc2", refuse_mc2, mc2, schemas.MC2)
