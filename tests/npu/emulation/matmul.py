"""npu_transpose_batchmatmul, and batch_matmul_transpose of sgl_kernel_npu."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kimi_k3_npu.ops.device import Cann, current
from tests.npu.emulation.core import FORGET, Limits, emulates

_fused = Limits("npu_transpose_batchmatmul", "dtype", "alignment")
_sgl = Limits("batch_matmul_transpose", "dtype")

# sgl_kernel_npu keeps one tiling for each m in a table of the process; (b, k, n) of the last call with that m.
_TILING: dict[int, tuple[int, int, int]] = {}
FORGET.append(_TILING.clear)


@emulates(_fused)
def npu_transpose_batchmatmul(
    input: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
) -> Tensor:
    """[M, B, N] from x1 permuted to [B, M, K] times weight [B, K, N]. Operands may have any strides."""
    x1, x2, y = tuple(perm_x1 or (0, 1, 2)), tuple(perm_x2 or (0, 1, 2)), tuple(perm_y or (1, 0, 2))
    _fused.no(bias=bias, scale=scale)
    _fused(input.dim() == 3 and weight.dim() == 3, f"{input.dim()}-D by {weight.dim()}-D, must be 3-D by 3-D")
    _fused(x1 in ((0, 1, 2), (1, 0, 2)), f"perm_x1={x1}, must be (0,1,2) or (1,0,2)")
    _fused(x2 == (0, 1, 2), f"perm_x2={x2}, must be (0,1,2)")
    _fused(y == (1, 0, 2), f"perm_y={y}, must be (1,0,2)")
    _fused(batch_split_factor in (None, 1), f"batch_split_factor={batch_split_factor}, must be 1")
    floats = (torch.float16, torch.bfloat16, torch.float32)
    _fused(input.dtype in floats and weight.dtype == input.dtype, f"{input.dtype} by {weight.dtype}", "dtype")

    x = input.permute(x1)
    (B, M, K), N = x.shape, weight.shape[2]
    _fused(weight.shape[:2] == (B, K), f"{[B, M, K]} after perm_x1 does not fit weight {list(weight.shape)}")
    _fused(M >= 1, "M = 0")
    for name, size in (("B", B), ("K", K), ("N", N)):
        _fused(1 <= size < 65536, f"{name} = {size}, must be in [1, 65536)")
    if x1 == (1, 0, 2) and current().soc != "a5" and current().before(Cann(9, 2, 0)):
        _fused(B * K < 65536, f"K*B = {B * K}, must be in [1, 65536) with perm_x1=(1,0,2)")
    _fused(K % 128 == 0 and N % 128 == 0, f"K = {K} and N = {N} must be multiples of 128", "alignment")
    return torch.bmm(x.float(), weight.float()).transpose(0, 1).to(input.dtype).contiguous()


@emulates(_sgl)
def batch_matmul_transpose(
    a: Tensor, b: Tensor, c: Tensor, format_mode: str | None = None, quant_mode: str | None = None
) -> None:
    """c[m, b, n] = a[m, b, k] @ b[b, k, n], written into c.

    The host code checks rank, dtype, k, b and the row of the tiling table. Contiguity and the shape of c are not
    checked there, and give wrong numbers; they raise here.
    """
    _sgl.soc("a2", "a3")
    _sgl.no(format_mode=format_mode, quant_mode=quant_mode)
    _sgl(a.dim() == 3 and b.dim() == 3, f"{a.dim()}-D by {b.dim()}-D, must be 3-D by 3-D")
    _sgl(a.dtype in (torch.float16, torch.bfloat16), f"{a.dtype}, must be float16 or bfloat16", "dtype")
    _sgl(a.dtype == b.dtype == c.dtype, f"{a.dtype}, {b.dtype} and {c.dtype} must be one dtype")
    (m, heads, k), n = a.shape, b.shape[2]
    _sgl(b.shape[:2] == (heads, k), f"a {list(a.shape)} does not fit b {list(b.shape)}")
    _sgl(1 <= m <= 1024, f"batchIdx is out of range: m = {m}, must be in 1..1024")
    _sgl(c.shape == (m, heads, n), f"c is {list(c.shape)}, must be {[m, heads, n]}: it is written past its end")
    _sgl(a.is_contiguous() and b.is_contiguous() and c.is_contiguous(), "wrong numbers for an operand with strides")
    before = _TILING.setdefault(m, (heads, k, n))
    _sgl(before == (heads, k, n), f"the tiling of m = {m} is {before} and is overwritten with {(heads, k, n)}")
    c.copy_(torch.bmm(a.transpose(0, 1).float(), b.float()).transpose(0, 1))


_SCHEMAS = torch.library.Library("npu", "FRAGMENT")
_SCHEMAS.define(
    "batch_matmul_transpose(Tensor tensor_a, Tensor tensor_b, Tensor(a!) tensor_c, str? format_mode=None, "
    "str? quant_mode=None) -> ()"
)
_SCHEMAS.impl("batch_matmul_transpose", lambda *_: None, "Meta")
