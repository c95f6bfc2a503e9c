"""A batch of any number of sequences alike, over caches without memory, as the attention of a planned pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from kimi_k3_npu.model.attention import LatentProjections
from kimi_k3_npu.model.cache import ModelCache
from kimi_k3_npu.model.delta_rule import DeltaRule
from kimi_k3_npu.ops.attention import causal_attention, latent_attention
from kimi_k3_npu.ops.kda import kda_step
from kimi_k3_npu.ops.kda_chunk import kda_chunk


@dataclass(frozen=True)
class Alike(Sequence[int]):
    """The same length so many `times`, without a list of them: a plan may ask about billions of sequences."""

    length: int
    times: int

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Alike: ...

    def __getitem__(self, index: int | slice) -> int | Alike:
        places = range(self.times)[index]
        return self.length if isinstance(places, int) else Alike(self.length, len(places))

    def __len__(self) -> int:
        return self.times

    def __contains__(self, length: object) -> bool:
        return length == self.length and self.times > 0


class Batch:
    """Implements `model.attention.Attention`: `sequences` that bring `queries` tokens each and end at `length`.

    A batch that decodes goes through the absorbed form and single steps, a prefill without a cached prefix through the
    expanded form and chunks.
    """

    def __init__(self, cache: ModelCache, sequences: int, queries: int, length: int, *, decodes: bool) -> None:
        self.cache, self.sequences, self.decodes = cache, sequences, decodes
        self.queries, self.lengths = Alike(queries, sequences), Alike(length, sequences)

    def mla(self, layer: LatentProjections, q: Tensor, kv_latent: Tensor, k_rope: Tensor) -> Tensor:
        if self.decodes:
            pools = self._slots(self.cache.mla_pools(layer.index))
            batch = (range(self.sequences), self.queries, self.lengths)
            return layer.raise_values(latent_attention(*layer.absorb(q), *pools, *batch, layer.scale))
        keys, values = layer.expand(kv_latent)
        keys = torch.cat([keys, k_rope.unsqueeze(1).expand(-1, keys.shape[1], -1)], dim=-1)
        return causal_attention(q, keys, values, self.queries, self.lengths, layer.scale)

    def kda(self, layer: int, rule: DeltaRule, mixed_qkv: Tensor, forget_gate: Tensor, beta: Tensor) -> Tensor:
        windows, states = self._slots(self.cache.kda_pools(layer))
        inputs, _ = rule.inputs(mixed_qkv, forget_gate, beta, windows, self.queries)
        o, _ = kda_step(*inputs, states) if self.decodes else kda_chunk(*inputs, states, self.queries)
        return o

    def _slots(self, pools: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Pools with a slot for each sequence, of the shapes that a cache of one slot has."""
        first, second = (pool.new_empty(self.sequences, *pool.shape[1:]) for pool in pools)
        return first, second
