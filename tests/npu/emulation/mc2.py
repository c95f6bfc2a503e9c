"""npu_moe_distribute_dispatch_v2 and npu_moe_distribute_combine_v2 between processes, with gloo as their communicator.

Apart from the other emulated operators, as they need several processes. Each call is also made on meta tensors: shapes
and dtypes are those of torch_npu. What one operator hands to the other is numbered as nobody else would number it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import product
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from kimi_k3_npu.ops import mc2
from kimi_k3_npu.ops.device import Device, assume, current, parse_cann
from kimi_k3_npu.parallel import experts
from tests.npu.emulation.core import calls, undefined

ALGORITHMS = {"a2": ("fullmesh", "hierarchy"), "a3": ("", "fullmesh_v1")}
ROWS = {"a2": 256, "a3": 512}
#: int32s for each row that may arrive, of which three are used here: where the row came from.
HANDLE = 128


def prepare() -> None:
    """Import torch_npu in a process that pytest has not set up, and register the operators."""
    from tests.npu.conftest import cann_is_installed, load_stand_in, open_meta_gates

    if not cann_is_installed():
        load_stand_in()
        open_meta_gates()
    import torch_npu  # noqa: F401

    install()


@cache
def install() -> torch.library.Library:
    """Register both for CPU tensors; the registrations last as long as the process."""
    library = torch.library.Library("npu", "IMPL")
    library.impl("npu_moe_distribute_dispatch_v2", dispatch, "CPU")
    library.impl("npu_moe_distribute_combine_v2", combine, "CPU")
    return library


@contextmanager
def emulated(soc: str = "a3", rows: int | None = None) -> Iterator[None]:
    """Inside the block this process is on an NPU that takes rows of any width and dtype, and any number of ranks.

    rows: The most on one rank, instead of the NPU's own limit.
    """
    limits = mc2.LIMITS[soc]
    loose = replace(limits, ranks=frozenset(range(2, 769)), hidden=range(1, 8193), dtypes=(torch.float32,))
    loose = replace(loose, rows=rows or limits.rows)
    with (
        patch.dict(mc2.LIMITS, {soc: loose}),
        patch.object(experts, "communicator_name", lambda group: group.group_name),
        assume(Device(soc, parse_cann("9.1"))),
    ):
        yield


def dispatch(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    expert_scales: Tensor | None = None,
    global_bs: int = 0,
    comm_alg: str = "",
    **others: object,
) -> tuple[Tensor, ...]:
    """(rows [A, H], no scales, handle, counts int64 [E], running counts int32, nothing, weights fp32 [A] on an A2).

    Rows are sorted by expert, then by the rank and the place they come from; running counts are of these pairs.
    """
    _no(others, tp_world_size=0, expert_shard_type=0, shared_expert_num=1, expert_token_nums_type=1)
    _check_ids(expert_ids, moe_expert_num)
    _check(x.dim() == 2 and len(x) == len(expert_ids), f"x is {list(x.shape)} for {len(expert_ids)} rows of expert ids")
    _check((expert_scales is not None) == (current().soc == "a2"), "expert_scales are for an A2 and needed there")
    group = _group(group_ep, ep_world_size, ep_rank_id, comm_alg)
    bs, k = expert_ids.shape
    everyone = _gather(group, (x, expert_ids, expert_scales, global_bs, moe_expert_num))
    largest = max(len(theirs[0]) for theirs in everyone)
    _check(len({theirs[3:] for theirs in everyone}) == 1, "global_bs and moe_expert_num must be the same on all ranks")
    _check(moe_expert_num % ep_world_size == 0, f"{moe_expert_num} experts over {ep_world_size} ranks")
    same = all(len(theirs[0]) == bs for theirs in everyone)
    allowed = {largest * ep_world_size} | ({0} if same else set())
    _check(global_bs in allowed, f"{global_bs=} for {largest} rows at most on {ep_world_size} ranks")

    held = moe_expert_num // ep_world_size
    room = (global_bs or bs * ep_world_size) * min(held, k)
    rows, handle = undefined((room, x.shape[1]), x.dtype), undefined((max(bs * k, room * HANDLE),), torch.int32)
    scales, counts = undefined((room if expert_scales is not None else 0,), torch.float32), []
    arrived = 0
    for expert in range(ep_rank_id * held, (ep_rank_id + 1) * held):
        for rank, (their_x, their_ids, their_scales, *_) in enumerate(everyone):
            for token, choice in (their_ids == expert).nonzero().tolist():
                rows[arrived] = their_x[token]
                handle[arrived * HANDLE : arrived * HANDLE + 3] = torch.tensor([rank, token, choice])
                if their_scales is not None:
                    scales[arrived] = their_scales[token, choice]
                arrived += 1
            counts.append(arrived)
    running = torch.tensor(counts, dtype=torch.int32)
    per_expert = running.view(held, ep_world_size)[:, -1].long()
    calls["npu_moe_distribute_dispatch_v2"] += 1
    meta = torch.ops.npu.npu_moe_distribute_dispatch_v2(
        x.to("meta"),
        expert_ids.to("meta"),
        group_ep,
        ep_world_size,
        ep_rank_id,
        moe_expert_num,
        expert_scales=None if expert_scales is None else expert_scales.to("meta"),
        global_bs=global_bs,
        comm_alg=comm_alg,
    )
    # On an A2 the counts are longer than what they say: the rest is for the operators alone.
    received = undefined(tuple(meta[4].shape), torch.int32)
    received[: len(running)] = running
    out = (
        rows,
        undefined(tuple(meta[1].shape), meta[1].dtype),
        handle,
        torch.diff(per_expert, prepend=per_expert.new_zeros(1)),
        received,
        torch.empty(0, dtype=torch.int32),
        scales,
    )
    assert [(t.shape, t.dtype) for t in out] == [(t.shape, t.dtype) for t in meta]
    return out


def combine(
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    expand_scales: Tensor | None = None,
    global_bs: int = 0,
    comm_alg: str = "",
    **others: object,
) -> Tensor:
    """sum_j expert_scales[t, j] * (the row that token t's choice j has become), [BS, H]."""
    _no(others, tp_world_size=0, expert_shard_type=0, shared_expert_num=1, comm_quant_mode=0)
    _check_ids(expert_ids, moe_expert_num)
    _check((expand_scales is not None) == (current().soc == "a2"), "expand_scales are for an A2 and needed there")
    fits = expert_scales.dtype == torch.float32 and expert_scales.shape == expert_ids.shape
    _check(fits, f"expert_scales are {expert_scales.dtype} {list(expert_scales.shape)}")
    group = _group(group_ep, ep_world_size, ep_rank_id, comm_alg)
    arrived = int(ep_send_counts[moe_expert_num - 1])
    _check(len(expand_x) >= arrived, f"{arrived} rows to send back of {len(expand_x)}")
    origins = assist_info_for_combine[: arrived * HANDLE].view(-1, HANDLE)[:, :3]
    everyone = _gather(group, (expand_x[:arrived], origins))
    out = torch.zeros(len(expert_ids), expand_x.shape[1])
    missing = set(product(range(expert_ids.shape[0]), range(expert_ids.shape[1])))
    for rows, theirs in everyone:
        for row, (rank, token, choice) in zip(rows, theirs.tolist(), strict=True):
            if rank == ep_rank_id:
                missing.remove((token, choice))
                out[token] += expert_scales[token, choice] * row.float()
    _check(not missing, f"no row came back for {missing}")
    calls["npu_moe_distribute_combine_v2"] += 1
    return out.to(expand_x.dtype)


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(f"moe_distribute: {message}")


def _no(others: dict[str, object], **defaults: object) -> None:
    """Options that are not emulated must keep their defaults."""
    given = {name: value for name, value in others.items() if value not in (None, 0, "", defaults.get(name))}
    _check(not given, f"not emulated: {given}")


def _check_ids(ids: Tensor, experts: int) -> None:
    soc = current().soc
    _check(soc in ROWS, f"does not exist on {soc}")
    bs, k = ids.shape
    _check(1 <= bs <= ROWS[soc], f"{bs} rows, must be 1..{ROWS[soc]}")
    _check(1 <= k <= 16, f"{k} experts a row, must be 1..16")
    _check(ids.dtype == torch.int32, f"expert ids are {ids.dtype}, must be int32")
    _check(bool(((ids >= 0) & (ids < experts)).all()), f"expert ids must be in 0..{experts - 1}")
    _check(all(len(set(row)) == k for row in ids.tolist()), "the expert ids of a row must differ")


def _group(name: str, size: int, rank: int, algorithm: str) -> dist.ProcessGroup:
    _check(0 < len(name) < 128, f"group_ep is {name!r}")
    _check(algorithm in ALGORITHMS[current().soc], f"comm_alg is {algorithm!r} on {current().soc}")
    group = _resolve_process_group(name)
    _check(
        (group.size(), group.rank()) == (size, rank),
        f"rank {rank} of {size}, but it is {group.rank()} of {group.size()}",
    )
    return group


def _gather(group: dist.ProcessGroup, mine: tuple) -> list[tuple]:
    everyone: list = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    return everyone
