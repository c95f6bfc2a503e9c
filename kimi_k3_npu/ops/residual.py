"""Attention residuals: a layer's input is a softmax mixture of the earlier blocks' outputs and the running sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_k3_npu.ops import sgl
from kimi_k3_npu.ops.device import Device
from kimi_k3_npu.ops.limits import FLOATS, OFFSET_LIMIT, no_kernel, nothing_to_run, wrong_dtype
from kimi_k3_npu.ops.op import operator

#: A row in fp32 and its products have to fit the unified buffer of a core: compiled for Ascend910B3, 8192 fits and
#: 12288 does not.
WIDEST_ROW = 8192


@operator("mix_residuals(Tensor prefix, Tensor bank, Tensor weight, float eps) -> Tensor")
def mix_residuals(prefix: Tensor, bank: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Mix the bank's rows and the running sum, which counts as the last row.

    prefix [T, H], bank [T, B, H], weight fp32 [H] (the product of the published norm weight and projection row).
    A row's score is its RMS-normed value times the weight, summed; the mixture is of the raw rows. fp32 inside, the
    result [T, H] has prefix's dtype.
    """
    last, rows = prefix.float(), bank.float()
    width = prefix.shape[-1]
    norms = torch.cat([rows.square().sum(-1), last.square().sum(-1, keepdim=True)], dim=-1)  # [T, B+1]
    scores = torch.cat([rows @ weight, (last @ weight).unsqueeze(-1)], dim=-1)
    shares = torch.softmax(scores * torch.rsqrt(norms / width + eps), dim=-1)
    mixed = torch.matmul(shares[:, None, :-1], rows).squeeze(1)  # [T, 1, B] @ [T, B, H]
    return torch.addcmul(mixed, shares[:, -1:], last).to(prefix.dtype)


@dataclass(frozen=True)
class Mix:
    """One mixture of `rows` bank rows a token on one device; `contiguous` is of prefix, bank and weight."""

    tokens: int
    rows: int
    width: int
    dtype: torch.dtype
    contiguous: bool
    device: Device


@mix_residuals.case(Mix)
def _case(prefix: Tensor, bank: Tensor, weight: Tensor, eps: float) -> tuple:
    contiguous = prefix.is_contiguous() and bank.is_contiguous() and weight.is_contiguous()
    return *bank.shape, prefix.dtype, contiguous


def refuse_fused(case: Mix) -> str | None:
    """The limits of sgl_kernel_npu's mix_fused. Any number of tokens will do: `fused` takes them in parts."""
    if reason := nothing_to_run(case.device, case.tokens) or no_kernel(case.device, sgl.MIX_FUSED):
        return reason
    if not case.rows:
        return "the bank has no rows"
    if case.width > WIDEST_ROW:
        return f"a row has {case.width} elements, at most {WIDEST_ROW} fit a core"
    if not case.contiguous:
        return "prefix, bank and weight must be contiguous"
    return wrong_dtype("prefix", case.dtype, FLOATS)


def tokens_per_launch(rows: int, width: int) -> int:
    """The kernel counts offsets into the bank in 32 bits."""
    return (OFFSET_LIMIT - 1) // (rows * width)


@mix_residuals.kernel("sgl_mix_fused", refuse_fused)
def fused(prefix: Tensor, bank: Tensor, weight: Tensor, eps: float) -> Tensor:
    kernel = sgl.kernel(sgl.MIX_FUSED)
    tokens, rows, width = bank.shape
    most = tokens_per_launch(rows, width)
    if tokens <= most:
        return kernel(prefix, bank, rows, weight, eps)
    parts = zip(prefix.split(most), bank.split(most), strict=True)
    return torch.cat([kernel(some, their_bank, rows, weight, eps) for some, their_bank in parts])
