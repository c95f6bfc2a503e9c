"""RMS norm as a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k3_npu.ops.norm import rms_norm
from kimi_k3_npu.parallel.shard import Layer, whole


class RMSNorm(Layer):
    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = self.allocate("weight", (width,), whole(width), dtype)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
