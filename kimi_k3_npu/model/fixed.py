"""The decode step in fixed shapes: one token for every sequence, and nothing but tensors decides what is computed.

Such a pass can be captured once as a graph and run again for the next tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k3_npu.model.attention import LatentProjections
from kimi_k3_npu.model.cache import PAGE, ModelCache
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
from kimi_k3_npu.model.delta_rule import DeltaRule, StatePools
from kimi_k3_npu.ops.attention import attend_one


class FixedAttention:
    """The attention of one new token for each of a cache's S slots.

    lengths int64 [S]: tokens that each slot holds already; the cache's own count is left alone. Only the first `reach`
    rows of a slot are looked at.
    """

    def __init__(self, cache: ModelCache, lengths: Tensor, reach: int) -> None:
        self.cache, self.lengths, self.reach = cache, lengths, reach
        self._slots = torch.arange(cache.num_slots, device=lengths.device)

    def mla(self, layer: LatentProjections, q: Tensor, kv_latent: Tensor, k_rope: Tensor) -> Tensor:
        latent, rope = self.cache.mla_pools(layer.index)
        latent[self._slots, self.lengths] = kv_latent.to(latent.dtype)
        rope[self._slots, self.lengths] = k_rope.to(rope.dtype)
        rows = latent[:, : self.reach], rope[:, : self.reach]
        return layer.raise_values(attend_one(*layer.absorb(q), *rows, self.lengths + 1, layer.scale))

    def kda(self, layer: int, rule: DeltaRule, mixed_qkv: Tensor, forget_gate: Tensor, beta: Tensor) -> Tensor:
        pools = StatePools(*self.cache.kda_pools(layer), slice(None))
        return rule.over_pools(mixed_qkv, forget_gate, beta, pools, [1] * self.cache.num_slots)


def decode_step(model: KimiK3ForCausalLM, cache: ModelCache, tokens: Tensor, lengths: Tensor, reach: int) -> Tensor:
    """tokens [S], one for each of the cache's slots -> logits fp32 [S, vocab]; lengths and reach as of
    FixedAttention."""
    counts = [len(tokens)]
    return model.logits(model(tokens, FixedAttention(cache, lengths, reach), counts=counts), counts)


def reach_of(longest: int, capacity: int) -> int:
    """Rows to look at for sequences of up to `longest` tokens: few different numbers, as each needs its own graph."""
    return min(capacity, max(PAGE, 1 << (longest - 1).bit_length()))
