"""Kimi Delta Attention: a gated delta rule with per-channel decay, behind a short convolution (69 of K3's 93
layers)."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k3_npu.config import TextConfig
from kimi_k3_npu.model.attention import Attention
from kimi_k3_npu.model.delta_rule import DeltaRule
from kimi_k3_npu.ops.norm import gated_rms_norm
from kimi_k3_npu.parallel.linear import REPLICATED, ColumnLinear, MergedLinear, RowLinear
from kimi_k3_npu.parallel.mesh import Mesh
from kimi_k3_npu.parallel.shard import Layer, Piece, split, whole


class KimiDeltaAttention(Layer):
    """h heads of width d on this rank, split over attn_tp; P = h d."""

    def __init__(self, config: TextConfig, index: int, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        heads, d, hidden, tp = config.kda_num_heads, config.kda_head_dim, config.hidden_size, mesh.attn_tp
        part = tp.part(heads, "KDA heads")
        self.index, self.tp, self.head_dim, self.num_heads = index, tp, d, part.stop - part.start
        self.gate_lower_bound, self.eps = config.gate_lower_bound, config.rms_norm_eps

        gate = {"g_proj": (heads * d, tp)} if config.use_full_rank_gate else {"g_a_proj": (d, REPLICATED)}
        rows = {name: (heads * d, tp) for name in ("q_proj", "k_proj", "v_proj")}
        self.in_proj = MergedLinear(hidden, {**rows, **gate, "f_a_proj": (d, REPLICATED), "b_proj": (heads, tp)}, dtype)
        self.f_b_proj = ColumnLinear(d, heads * d, tp, "KDA forget gate", dtype)
        self.g_b_proj = None if config.use_full_rank_gate else ColumnLinear(d, heads * d, tp, "KDA output gate", dtype)

        P, W = self.num_heads * d, config.short_conv_kernel_size
        channels = slice(part.start * d, part.stop * d)
        self.conv_weight = self.allocate(
            "conv_weight",
            (3 * P, W),
            {
                name: Piece((heads * d, 1, W), (channels,), (slice(i * P, (i + 1) * P),))
                for i, name in enumerate(("q_conv1d", "k_conv1d", "v_conv1d"))
            },
            torch.float32,
        )
        self.A_log = self.allocate("A_log", (self.num_heads,), Piece((heads,), (part,)), torch.float32)
        self.dt_bias = self.allocate("dt_bias", (P,), split((heads * d,), 0, tp, "dt_bias"), torch.float32)
        self.o_norm = self.allocate("o_norm", (d,), whole(d), torch.float32)
        self.o_proj = RowLinear(heads * d, hidden, tp, "KDA output", dtype)

    @property
    def rule(self) -> DeltaRule:
        """The weights of the recurrence, as they are now."""
        dt_bias = self.dt_bias.view(self.num_heads, self.head_dim)
        return DeltaRule(self.conv_weight, self.A_log, dt_bias, self.gate_lower_bound)

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        """x [T, H], normed -> [T, H], complete."""
        projected = self.in_proj(x)
        mixed_qkv, gate, forget, beta = projected.split(
            [3 * self.num_heads * self.head_dim, *self.in_proj.sizes[3:]], dim=-1
        )
        forget = self.f_b_proj(forget).unflatten(-1, (self.num_heads, self.head_dim))  # [T, h, d]
        o = attention.kda(self.index, self.rule, mixed_qkv, forget, beta)
        if self.g_b_proj is not None:
            gate = self.g_b_proj(gate)
        o = gated_rms_norm(o, gate.unflatten(-1, (self.num_heads, self.head_dim)), self.o_norm, self.eps)
        return self.tp.all_reduce(self.o_proj(o.flatten(1)))
