"""The gated MLP: the feed-forward part of dense layers (layer 0 of K3), and the shared experts of the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kimi_k3_npu.config import TextConfig
from kimi_k3_npu.ops.situ import gated_activation
from kimi_k3_npu.parallel.groups import Group
from kimi_k3_npu.parallel.linear import MergedLinear, RowLinear
from kimi_k3_npu.parallel.mesh import Mesh
from kimi_k3_npu.parallel.shard import Layer


class MLP(Layer):
    """down(act(gate x, up x)), its inner width split over `group`; returns the partial sum of this rank."""

    def __init__(self, config: TextConfig, width: int, group: Group, what: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.beta, self.linear_beta = config.activation_betas
        rows = {"gate_proj": (width, group), "up_proj": (width, group)}
        self.gate_up_proj = MergedLinear(config.hidden_size, rows, dtype)
        self.down_proj = RowLinear(width, config.hidden_size, group, what, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H], to be summed over the group."""
        return self.down_proj(gated_activation(self.gate_up_proj(x), self.beta, self.linear_beta))


class DenseMLP(Layer):
    """The feed-forward part of a layer without experts, split over tp, or over attn_tp with
    enable_dense_mlp_attn_tp."""

    def __init__(self, config: TextConfig, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.mesh = mesh
        self.dense = MLP(config, config.intermediate_size, mesh.dense, "dense MLP", dtype)

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """x [T, H], normed; counts: the rows of each data-parallel replica. Returns [T, H], complete."""
        if self.mesh.layout.enable_dense_mlp_attn_tp:
            return self.mesh.attn_tp.all_reduce(self.dense(x))
        return self.mesh.sum_own_rows(self.dense(self.mesh.all_replicas(x, counts)), counts)
