"""The v-up projection of absorbed MLA, [M, B, K] x [B, K, N] -> [M, B, N], and the kernels that can do it.

M tokens of this rank, B heads of this rank, K the rank of the latent (512), N the value size of a head (128).
`npu_transpose_batchmatmul` takes x token-major or head-major; `batch_matmul_transpose` is sgl_kernel_npu's;
`torch.bmm` takes anything. Where two sources give different limits, the stricter one is here. Sources: torch_npu's
page on npu_transpose_batchmatmul, CANN's page on aclnnTransposeBatchMatMul and on the graph pass that fuses into it,
and the host code of sgl-kernel-npu. The product that is limited is B*K; M has no upper limit in the fused operator.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_k3_npu import envs
from kimi_k3_npu.ops import schemas, sgl
from kimi_k3_npu.ops.device import Cann, Device, parse_cann, parse_soc
from kimi_k3_npu.ops.limits import no_kernel
from kimi_k3_npu.ops.op import Choice, operator

#: Sizes that the fused operator counts in 16 bits must stay below this.
INNER_LIMIT = 65536
#: The fused operator's K and N are multiples of this.
ALIGNMENT = 128
#: From this CANN on, B*K may reach INNER_LIMIT when the input is token-major, unquantised and not split.
CANN_WITHOUT_PRODUCT_LIMIT = Cann(9, 2, 0)
#: Rows of batch_matmul_transpose's tiling table, one for each M.
TILING_ROWS = 1024


@dataclass(frozen=True)
class Bmm:
    """One batched matmul [M, B, K] x [B, K, N] -> [M, B, N] on one device; `contiguous` is of both operands."""

    M: int
    B: int
    K: int
    N: int
    dtype: torch.dtype
    contiguous: bool
    device: Device


@operator("v_up(Tensor x, Tensor w) -> Tensor")
def v_up(x: Tensor, w: Tensor) -> Tensor:
    """Each head's latent through its value matrix: x [M, B, K], w [B, K, N] -> contiguous [M, B, N].

    Any strides, any M (an idle rank has none), one floating-point dtype for x, w and the result.
    """
    return bmm(x, w)


def select_v_up(
    M: int,
    B: int,
    K: int,
    N: int,
    *,
    dtype: torch.dtype,
    soc: str,
    cann: str | tuple[int, ...] | None,
    contiguous: bool = True,
    have_sgl_kernel_npu: bool = True,
) -> Choice:
    """The kernel for v-up on one rank; a pure function but for KIMI_K3_NPU_V_UP, which forces a kernel.

    With M = 0 the choice is "bmm" as the others refuse, but the operator returns an empty tensor and launches nothing.

    Args:
        M: Tokens.
        B: Heads of this rank.
        K: Rank of the latent.
        N: Value size of a head.
        dtype: Of both operands.
        soc: As for `device.parse_soc`.
        cann: As for `device.parse_cann`; None with soc "cpu".
        contiguous: Whether both operands are.
        have_sgl_kernel_npu: Whether the package can be imported.

    Raises:
        LaunchError: KIMI_K3_NPU_V_UP names a kernel that does not exist or refuses this case.
    """
    return v_up.choose(Bmm(M, B, K, N, dtype, contiguous, _device(soc, cann, have_sgl_kernel_npu)))


def _device(soc: str, cann: str | tuple[int, ...] | None, have_sgl_kernel_npu: bool) -> Device:
    packages = frozenset({"sgl_kernel_npu"} if have_sgl_kernel_npu else ())
    return Device(parse_soc(soc), None if cann is None else parse_cann(cann), packages)


def sizes_of(op: str, x: Tensor, w: Tensor) -> tuple | None:
    """What decides about kernels for [M, B, K] x [B, K, N]; None for M = 0, when nothing is launched.

    Raises:
        ValueError: Shapes or dtypes do not fit, which torch_npu's own shape functions let pass.
    """
    left, right, dtype = x.shape, w.shape, x.dtype
    if len(left) != 3 or len(right) != 3 or left[1] != right[0] or left[2] != right[1] or dtype != w.dtype:
        found = f"{list(left)} {dtype} and {list(right)} {w.dtype}"
        raise ValueError(f"{op} multiplies [M, B, K] by [B, K, N] of the same dtype, got {found}")
    return (*left, right[2], dtype, x.is_contiguous() and w.is_contiguous()) if left[0] else None


@v_up.case(Bmm)
def _case(x: Tensor, w: Tensor) -> tuple | None:
    return sizes_of("v_up", x, w)


@v_up.forced
def _forced(case: Bmm) -> str | None:
    """Nothing is launched for an idle rank, so nothing is forced on it."""
    return envs.one_of(envs.V_UP, [kernel.name for kernel in v_up.kernels]) if case.M else None


def refuse_token_major(case: Bmm) -> str | None:
    """The limits of npu_transpose_batchmatmul with perm_x1=(1,0,2)."""
    if reason := _refuse_fused(case):
        return reason
    product = case.B * case.K
    # Before 9.2 only the 950 (A5) is documented without this limit.
    if product >= INNER_LIMIT and case.device.soc != "a5" and case.device.before(CANN_WITHOUT_PRODUCT_LIMIT):
        return f"K*B = {product}, must be below {INNER_LIMIT} with perm_x1=(1,0,2) before CANN 9.2"
    return None


def refuse_head_major(case: Bmm) -> str | None:
    """The limits of npu_transpose_batchmatmul with perm_x1=(0,1,2): K alone is below 65536."""
    return _refuse_fused(case)


def _refuse_fused(case: Bmm) -> str | None:
    if case.device.soc == "cpu":
        return "there is no NPU"
    if case.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"dtype = {case.dtype}, must be float16, bfloat16 or float32"
    if case.M < 1:
        return f"M = {case.M}, must be at least 1"
    for name, size in (("B", case.B), ("K", case.K), ("N", case.N)):
        if not 1 <= size < INNER_LIMIT:
            return f"{name} = {size}, must be at least 1 and below {INNER_LIMIT}"
    for name, size in (("K", case.K), ("N", case.N)):
        if size % ALIGNMENT:
            return f"{name} = {size}, must be a multiple of {ALIGNMENT}"
    return None


def refuse_batch_matmul_transpose(case: Bmm) -> str | None:
    """The limits of sgl_kernel_npu's batch_matmul_transpose."""
    if case.device.soc not in ("a2", "a3"):
        return f"does not exist on {case.device.soc}, only on a2 and a3"
    if reason := no_kernel(case.device, sgl.BATCH_MATMUL_TRANSPOSE):
        return reason
    if case.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype = {case.dtype}, must be float16 or bfloat16"
    if not 1 <= case.M <= TILING_ROWS:
        return f"M = {case.M}, must be in 1..{TILING_ROWS}"
    if not case.contiguous:
        # Its host code does not look at strides: it would read a view as if it were contiguous. Copying the weight for
        # each call costs more than torch.bmm.
        return "both operands must be contiguous"
    return None


@v_up.kernel("transpose_batchmatmul", refuse_token_major, schemas.TRANSPOSE_BATCHMATMUL)
def token_major(x: Tensor, w: Tensor) -> Tensor:
    """One launch: the fused operator reads x as it lies, [M, B, K]. Either operand may be a view."""
    return torch.ops.npu.npu_transpose_batchmatmul(x, w, perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2])


@v_up.kernel("transpose_batchmatmul_head_major", refuse_head_major, schemas.TRANSPOSE_BATCHMATMUL)
def head_major(x: Tensor, w: Tensor) -> Tensor:
    """The fused operator after a copy of x to [B, M, K], whose rows are K apart, not B*K."""
    x = contiguous(x.transpose(0, 1))
    return torch.ops.npu.npu_transpose_batchmatmul(x, w, perm_x1=[0, 1, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2])


@v_up.kernel("batch_matmul_transpose", refuse_batch_matmul_transpose)
def batch_matmul_transpose(x: Tensor, w: Tensor) -> Tensor:
    """sgl_kernel_npu's kernel, which writes into its third argument."""
    importlib.import_module("sgl_kernel_npu")  # registers the operator
    out = x.new_empty(x.shape[0], x.shape[1], w.shape[2])
    torch.ops.npu.batch_matmul_transpose(contiguous(x), contiguous(w), out)
    return out


@v_up.kernel("bmm")
def bmm(x: Tensor, w: Tensor) -> Tensor:
    """torch.bmm between two transpositions."""
    return contiguous(torch.bmm(x.transpose(0, 1), w).transpose(0, 1))


def contiguous(x: Tensor) -> Tensor:
    """`x.contiguous()`, which torch_npu gives a kernel that asks for a device even when x is a fake tensor."""
    return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
