"""The mixture of experts: a router, routed experts in a narrower latent space, and shared experts beside them.

Letters: T tokens, H hidden size, L width of the latent space (H where there is none), E experts, k of them per token, I
width inside an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k3_npu.config import MXFP4_GROUP, TextConfig
from kimi_k3_npu.model.mlp import MLP
from kimi_k3_npu.model.norm import RMSNorm
from kimi_k3_npu.ops.experts import moe_experts, moe_experts_mxfp4
from kimi_k3_npu.ops.routing import route
from kimi_k3_npu.parallel.experts import AllToAll, ExpertDispatch
from kimi_k3_npu.parallel.linear import ReplicatedLinear
from kimi_k3_npu.parallel.mesh import Mesh
from kimi_k3_npu.parallel.shard import Layer, Piece, whole


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


class Experts(Layer):
    """This rank's share of the routed experts, as plain matrices: whole experts over ep, their width over moe_tp."""

    #: How many input columns one stored column holds, for each stored form of a matrix.
    forms: ClassVar[dict[str, int]] = {"": 1}

    def __init__(self, config: TextConfig, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        held = mesh.ep.part(config.num_experts, "routed experts")
        self.first = held.start
        self.betas = config.activation_betas
        latent, inner, count = config.expert_hidden_size, config.moe_intermediate_size, held.stop - held.start
        rows = mesh.moe_tp.part(inner, "expert width")  # of w1 and w3, and columns of w2
        width = rows.stop - rows.start
        for form, packing in self.forms.items():
            upper, lower = (inner, latent // packing), (latent, inner // packing)
            columns = mesh.moe_tp.part(lower[1], "stored expert width")
            w13 = {
                f"{held.start + e}.{name}": Piece(upper, (rows,), (slice(e, e + 1), place))
                for e in range(count)
                for name, place in (("w1", slice(0, width)), ("w3", slice(width, 2 * width)))
            }
            w2 = {
                f"{held.start + e}.w2": Piece(lower, (slice(None), columns), (slice(e, e + 1),)) for e in range(count)
            }
            stored = torch.uint8 if form else dtype
            self.allocate(f"w13{form}", (count, 2 * width, upper[1]), w13, stored)
            self.allocate(f"w2{form}", (count, latent, columns.stop - columns.start), w2, stored)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """x [T, L], weights fp32 [T, k], ids [T, k] -> [T, L], the weighted sum over what is held here."""
        return moe_experts(x, weights, ids, self.w13, self.w2, self.first, *self.betas)


class PackedExperts(Experts):
    """The same with weights kept as MXFP4: two 4-bit values a byte and one scale per 32 inputs, expanded while in
    use."""

    forms: ClassVar[dict[str, int]] = {"_packed": 2, "_scale": MXFP4_GROUP}

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        matrices = (self.w13_packed, self.w13_scale, self.w2_packed, self.w2_scale)
        return moe_experts_mxfp4(x, weights, ids, *matrices, self.first, *self.betas)


class LatentMoE(Layer):
    """The parts of one mixture; how the tokens meet the experts is the subclass's `forward`."""

    def __init__(self, config: TextConfig, mesh: Mesh, dtype: torch.dtype, *, packed: bool) -> None:
        super().__init__()
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        self.mesh = mesh
        self.gate = Router(config)
        self.experts = (PackedExperts if packed else Experts)(config, mesh, dtype)
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

    def __init__(self, config: TextConfig, mesh: Mesh, dtype: torch.dtype, *, packed: bool) -> None:
        super().__init__(config, mesh, dtype, packed=packed)
        self.dispatch: ExpertDispatch = AllToAll(mesh.ep, config.num_experts)

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
