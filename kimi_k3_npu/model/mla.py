"""Gated multi-head latent attention without rotary embedding (24 of K3's 93 layers).

Keys and values of a token are made from one latent row of width R, plus a key part of width r that all heads share. The
cache holds just these R + r numbers. Letters: h heads of this rank, n query/key width from the latent, v value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k3_npu.config import TextConfig
from kimi_k3_npu.model.attention import Attention
from kimi_k3_npu.model.norm import RMSNorm
from kimi_k3_npu.ops.q_absorb import q_absorb
from kimi_k3_npu.ops.v_up import v_up
from kimi_k3_npu.parallel.linear import REPLICATED, ColumnLinear, MergedLinear, RowLinear
from kimi_k3_npu.parallel.mesh import Mesh
from kimi_k3_npu.parallel.shard import Layer


class MultiHeadLatentAttention(Layer):
    w_uv: Tensor

    def __init__(self, config: TextConfig, index: int, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        heads, hidden, tp = config.num_attention_heads, config.hidden_size, mesh.attn_tp
        self.index, self.tp = index, tp
        self.num_heads = heads // tp.size
        self.n, self.r, self.v, self.R = (
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
            config.kv_lora_rank,
        )
        self.scale = (self.n + self.r) ** -0.5
        tp.part(heads, "attention heads")

        q_rank, eps = config.q_lora_rank, config.mla_latent_norm_eps
        q_rows = (heads * config.qk_head_dim, tp) if q_rank is None else (q_rank, REPLICATED)
        rows = {
            "q_proj" if q_rank is None else "q_a_proj": q_rows,
            "kv_a_proj_with_mqa": (self.R + self.r, REPLICATED),
        }
        if config.mla_use_output_gate:
            rows["g_proj"] = (heads * self.v, tp)
        self.has_gate = config.mla_use_output_gate
        self.in_proj = MergedLinear(hidden, rows, dtype)
        self.q_a_layernorm = RMSNorm(q_rank, eps, dtype) if q_rank else None
        self.q_b_proj = ColumnLinear(q_rank, heads * config.qk_head_dim, tp, "MLA queries", dtype) if q_rank else None
        self.kv_a_layernorm = RMSNorm(self.R, eps, dtype)
        self.kv_b_proj = ColumnLinear(self.R, heads * (self.n + self.v), tp, "MLA keys and values", dtype)
        self.o_proj = RowLinear(heads * self.v, hidden, tp, "MLA output", dtype)
        self.register_buffer("w_uv", torch.empty(self.num_heads, self.R, self.v, dtype=dtype), persistent=False)

    @torch.no_grad()
    def prepare(self) -> None:
        """Copy the values' half of kv_b_proj to w_uv [h, R, v], contiguous: some batched-matmul kernels need that."""
        self.w_uv.copy_(self._kv_b()[:, self.n :].transpose(1, 2))

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        """x [T, H], normed -> [T, H], complete."""
        q, kv, *gate = self.in_proj.project(x)
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            q = self.q_b_proj(self.q_a_layernorm(q))
        q = q.unflatten(-1, (self.num_heads, self.n + self.r))  # [T, h, n + r]
        latent, k_rope = kv.split([self.R, self.r], dim=-1)
        latent = self.kv_a_layernorm(latent)

        o = attention.mla(self, q, latent, k_rope).flatten(1)  # [T, h v]
        if self.has_gate:
            o = o * gate[0].float().sigmoid().to(o.dtype)
        return self.tp.all_reduce(self.o_proj(o))

    def absorb(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """q [T, h, n + r] -> [T, h, R], [T, h, r]."""
        return q_absorb(q[..., : self.n], self._kv_b()[:, : self.n]), q[..., self.n :]

    def raise_values(self, o: Tensor) -> Tensor:
        """o [T, h, R] -> [T, h, v]."""
        return v_up(o, self.w_uv)

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """latent [Tk, R] -> keys [Tk, h, n], values [Tk, h, v]."""
        both = self.kv_b_proj(latent).unflatten(-1, (self.num_heads, self.n + self.v))
        keys, values = both.split([self.n, self.v], dim=-1)
        return keys, values

    def _kv_b(self) -> Tensor:
        return self.kv_b_proj.weight.view(self.num_heads, self.n + self.v, self.R)
