"""The mixture of experts: a router, routed experts in a narrower latent space, and shared experts beside them.

Letters: T tokens, H hidden size, L width of the latent space (H where there is none), E experts, k of them per token, I
width inside an expert.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k3_npu.config import TextConfig
from kimi_k3_npu.formats import FORMATS
from kimi_k3_npu.model.experts import Experts
from kimi_k3_npu.model.mlp import MLP
from kimi_k3_npu.model.norm import RMSNorm
from kimi_k3_npu.ops.routing import route
from kimi_k3_npu.parallel.experts import AllToAll, ExpertDispatch, Mc2
from kimi_k3_npu.parallel.linear import ReplicatedLinear
from kimi_k3_npu.parallel.mesh import Mesh
from kimi_k3_npu.parallel.shard import Layer, whole


class Router(Layer):
    """Scores every expert in fp32 from the full-width input."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        experts, hidden = config.num_experts, config.hidden_size
        self.config = config
        self.weight = self.allocate("weight", (experts, hidden), whole(experts, hidden), torch.float32)
        self.bias = self.allocate("bias", (experts,), whole(experts), torch.float32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> weights fp32 [T, k], expert ids [T, k]."""
        c = self.config
        return route(
            F.linear(x.float(), self.weight),
            self.bias,
            c.num_experts_per_token,
            c.num_expert_group,
            c.topk_group,
            c.moe_renormalize,
            c.routed_scaling_factor,
            c.moe_router_activation_func == "sigmoid",
        )


class LatentMoE(Layer):
    """The parts of one mixture; how the tokens meet the experts is the subclass's `forward`."""

    def __init__(self, config: TextConfig, mesh: Mesh, dtype: torch.dtype, experts: str) -> None:
        super().__init__()
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        self.mesh = mesh
        self.gate = Router(config)
        self.experts = Experts(config, mesh, dtype, FORMATS[experts])
        self.routed_expert_down_proj = ReplicatedLinear(hidden, latent, dtype) if latent else None
        self.routed_expert_up_proj = ReplicatedLinear(latent, hidden, dtype) if latent else None
        use_norm = latent and config.latent_moe_use_norm
        self.routed_expert_norm = RMSNorm(config.expert_hidden_size, config.rms_norm_eps, dtype) if use_norm else None
        shared = config.num_shared_experts * config.moe_intermediate_size
        self.shared_experts = MLP(config, shared, mesh.shared, "shared experts", dtype) if shared else None

    def to_latent(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, L]."""
        return x if self.routed_expert_down_proj is None else self.routed_expert_down_proj(x)

    def from_latent(self, y: Tensor) -> Tensor:
        """[T, L] -> [T, H]. `y` must be the sum over all experts: the norm of a part is a different function."""
        if self.routed_expert_norm is not None:
            y = self.routed_expert_norm(y)
        return y if self.routed_expert_up_proj is None else self.routed_expert_up_proj(y)


class GatheredMoE(LatentMoE):
    """Without an all-to-all: every rank sees the tokens of all replicas and adds what its experts have to say."""

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """x [T, H], normed; counts: the rows of each data-parallel replica. Returns [T, H], complete."""
        rows = self.mesh.all_replicas(x, counts)
        weights, ids = self.gate(rows)
        y = self.mesh.sum_own_rows(self.experts(self.to_latent(rows), weights, ids), counts)
        out = self.from_latent(y)
        if self.shared_experts is not None:
            out = out + self.mesh.sum_own_rows(self.shared_experts(rows), counts)
        return out


class DispatchedMoE(LatentMoE):
    """With an all-to-all: the ranks of a replica share out its rows, and each row travels to its experts' ranks."""

    def __init__(self, config: TextConfig, mesh: Mesh, dtype: torch.dtype, experts: str) -> None:
        super().__init__(config, mesh, dtype, experts)
        self.dispatch: ExpertDispatch = AllToAll(mesh.ep, config.num_experts)
        if mesh.layout.moe_dispatch == "mc2":
            self.dispatch = Mc2(mesh.mc2, config.num_experts, otherwise=self.dispatch)

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """x [T, H], normed; counts: the rows of each data-parallel replica. Returns [T, H], complete."""
        group = self.mesh.attn_tp
        chunks = group.chunks(x.shape[0])
        own = x[group.bounds(chunks)]
        weights, ids = self.gate(own)
        largest = max(max(group.chunks(rows)) for rows in counts)
        out = self.from_latent(self.dispatch(self.to_latent(own), weights, ids, self.experts, largest))
        if self.shared_experts is not None:
            out = out + self._shared(own, chunks)
        return group.all_gather(out, chunks)

    def _shared(self, own: Tensor, chunks: Sequence[int]) -> Tensor:
        """The shared experts on this rank's rows; where their weights are split, on all rows of the ranks that split
        them."""
        group, first = self.mesh.shared, self.mesh.attn_tp.rank - self.mesh.shared.rank
        members = chunks[first : first + group.size]
        assert self.shared_experts is not None
        return group.reduce_scatter(self.shared_experts(group.all_gather(own, members)), members)
