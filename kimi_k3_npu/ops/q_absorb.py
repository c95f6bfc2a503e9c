"""The q absorption of absorbed MLA, [M, B, n] x [B, n, R] -> [M, B, R]: v-up turned around, with its limits.

M tokens of this rank, B heads of this rank, n the non-rotary size of a head (128), R the rank of the latent (512).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k3_npu.ops.device import Device, parse_cann, parse_soc
from kimi_k3_npu.ops.op import Choice, operator
from kimi_k3_npu.ops.v_up import Bmm, bmm, sizes_of, v_up


@operator("q_absorb(Tensor q, Tensor w) -> Tensor")
def q_absorb(q: Tensor, w: Tensor) -> Tensor:
    """Each head's query into the latent: q [M, B, n], w [B, n, R] -> contiguous [M, B, R].

    Any strides, any M (an idle rank has none), one floating-point dtype for q, w and the result.
    """
    return bmm(q, w)


@q_absorb.case(Bmm)
def _case(q: Tensor, w: Tensor) -> tuple | None:
    return sizes_of("q_absorb", q, w)


# sgl_kernel_npu's batch_matmul_transpose is left to v-up. It keeps its tiling in one table of the process, with a row
# for each M that every call rewrites. Two products of different shape with the same M, as these two are in every
# layer, share a row: a kernel that is still queued, or a graph that is replayed, may run with the tiling of the other.
for kernel in v_up.kernels:
    if kernel.name != "batch_matmul_transpose":
        q_absorb.add(kernel)


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
    return q_absorb.choose(Bmm(M, B, n, R, dtype, contiguous, device))
