"""The q absorption of absorbed MLA, [M, B, n] x [B, n, R] -> [M, B, R]: v-up turned around, with its limits.

M tokens of this rank, B heads of this rank, n the non-rotary size of a head (128), R the rank of the latent (512).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k3_npu.ops.device import Device, parse_cann, parse_soc
from kimi_k3_npu.ops.registry import define, npu_kernel
from kimi_k3_npu.ops.select import Choice, choose
from kimi_k3_npu.ops.v_up import CANDIDATES as V_UP_CANDIDATES
from kimi_k3_npu.ops.v_up import Bmm, bmm, run_bmm

# sgl_kernel_npu's batch_matmul_transpose is left to v-up. It keeps its tiling in one table of the process, with a row
# for each M that every call rewrites. Two products of different shape with the same M, as these two are in every
# layer, share a row: a kernel that is still queued, or a graph that is replayed, may run with the tiling of the other.
CANDIDATES = tuple(candidate for candidate in V_UP_CANDIDATES if candidate.name != "batch_matmul_transpose")


@define("q_absorb(Tensor q, Tensor w) -> Tensor")
def q_absorb(q: Tensor, w: Tensor) -> Tensor:
    """Each head's query into the latent: q [M, B, n], w [B, n, R] -> contiguous [M, B, R].

    Any strides, any M (an idle rank has none), one floating-point dtype for q, w and the result.
    """
    return bmm(q, w)


@npu_kernel("q_absorb")
def q_absorb_npu(q: Tensor, w: Tensor) -> Tensor:
    """`q_absorb` on an NPU, by the kernel that `select_q_absorb` chooses. Raises ValueError if q and w do not fit."""
    return run_bmm("q_absorb", q, w, choose_q_absorb)


def select_q_absorb(
    M: int,
    B: int,
    n: int,
    R: int,
    *,
    dtype: torch.dtype,
    soc: str,
    cann: str | tuple[int, ...] | None,
    contiguous: bool = True,
) -> Choice:
    """The kernel for q absorption on one rank; arguments as of `v_up.select_v_up`, and no variable forces it."""
    device = Device(parse_soc(soc), None if cann is None else parse_cann(cann))
    return choose_q_absorb(Bmm(M, B, n, R, dtype, contiguous, device))


def choose_q_absorb(case: Bmm) -> Choice:
    """As `select_q_absorb`, for a case that is already put together: K is n, N is R."""
    return choose("q_absorb", CANDIDATES, case)
