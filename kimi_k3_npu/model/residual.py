"""Attention residuals: each block of layers adds to its own running sum, and reads a mixture of all earlier ones."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k3_npu.ops.residual import mix_residuals
from kimi_k3_npu.parallel.shard import Layer, whole


class ResidualMixer(Layer):
    """Mixes the bank's rows with the running sum of the current block. Scores come from normed rows, the mixture is
    raw.

    The published norm weight [H] and projection row [1, H] only ever act as their product, so that is the parameter.
    """

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        pieces = {"norm": whole(hidden_size), "proj": whole(1, hidden_size)}
        self.weight = self.allocate("weight", (hidden_size,), pieces, torch.float32)

    def forward(self, prefix: Tensor, bank: Tensor) -> Tensor:
        """prefix [T, H], bank [T, B, H] -> [T, H]."""
        return mix_residuals(prefix, bank, self.weight, self.eps)
