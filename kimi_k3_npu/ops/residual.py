"""Attention residuals: a layer's input is a softmax mixture of the earlier blocks' outputs and the running sum."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k3_npu.ops.registry import define


@define("mix_residuals(Tensor prefix, Tensor bank, Tensor weight, float eps) -> Tensor")
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
