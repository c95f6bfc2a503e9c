"""Attention over whole sequences that keeps nothing, so that gradients flow through it: what training needs.

Letters: T tokens of S sequences, n tokens of the longest, h heads, d any width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kimi_k3_npu.model.attention import LatentProjections
from kimi_k3_npu.model.delta_rule import DeltaRule
from kimi_k3_npu.ops.attention import causal_attention
from kimi_k3_npu.ops.kda import normed_qkv, short_conv
from kimi_k3_npu.ops.kda_chunk import kda_chunk


class UncachedAttention:
    """The attention of one forward pass over S whole sequences of `lengths` tokens (at least one each), laid end to
    end.

    The sequences are filled up to the longest and folded into the heads: to an operator the batch is one sequence of
    S h heads. What fills comes after a sequence's tokens, so none of them sees it.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.batch, self.longest = len(lengths), max(lengths)
        self._lengths = [self.longest]
        # token t of sequence s is row t * S + s of the folded batch
        self._rows = torch.cat([torch.arange(n, device=device) * self.batch + s for s, n in enumerate(lengths)])

    def mla(self, layer: LatentProjections, q: Tensor, kv_latent: Tensor, k_rope: Tensor) -> Tensor:
        keys, values = layer.expand(kv_latent)
        shared = k_rope.unsqueeze(1).expand(-1, keys.shape[1], -1)  # [T, h, r]
        folded = (self._fold(x) for x in (q, torch.cat([keys, shared], dim=-1), values))
        return self._unfold(causal_attention(*folded, self._lengths, self._lengths, layer.scale))

    def kda(self, layer: int, rule: DeltaRule, mixed_qkv: Tensor, forget_gate: Tensor, beta: Tensor) -> Tensor:
        heads, d = rule.dt_bias.shape
        weight = rule.conv_weight.repeat(self.batch, 1)  # [S 3hd, W]
        window = mixed_qkv.new_zeros(1, weight.shape[1] - 1, len(weight))
        mixed, _ = short_conv(self._fold(mixed_qkv), weight, window, self._lengths)
        qkv = normed_qkv(mixed.view(self.longest * self.batch, 3 * heads * d), heads)
        q, k, v = (x.reshape(self.longest, self.batch * heads, d) for x in qkv)
        g = rule.log_decay(forget_gate)
        state = g.new_zeros(1, self.batch * heads, d, d)
        o, _ = kda_chunk(q, k, v, self._fold(g), self._fold(beta.float().sigmoid()), state, self._lengths)
        return self._unfold(o)

    def _fold(self, x: Tensor) -> Tensor:
        """[T, h, ...] -> [n, S h, ...], zeros where a sequence has ended."""
        rows = x.new_zeros(self.longest * self.batch, *x.shape[1:]).index_copy(0, self._rows, x)
        return rows.view(self.longest, -1, *x.shape[2:])

    def _unfold(self, x: Tensor) -> Tensor:
        """[n, S h, d] -> [T, h, d]."""
        return x.unflatten(1, (self.batch, -1)).flatten(0, 1)[self._rows]
