"""What a model needs from whoever keeps the caches: the attention protocol, and its implementation over our own cache.

Letters: T tokens of the batch, h heads of this rank, n | r query/key widths without and with the shared part, v value
width, R latent width, d KDA head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, Protocol

import torch
from torch import Tensor

from kimi_k3_npu.model.cache import ModelCache
from kimi_k3_npu.model.delta_rule import DeltaRule, KdaForm, StatePools
from kimi_k3_npu.ops.attention import causal_attention, consecutive, latent_attention


class LatentProjections(Protocol):
    """What an MLA layer lends to whoever attends for it. All three take any number of rows.

    Over the same cache rows there are two forms. Absorbed: `absorb` the queries, attend over the latent rows as keys
    and as values, `raise_values`. Expanded: `expand` the rows of the sequence into keys and values, of which each key
    goes on with the token's shared part, and attend over those. Decoding is cheaper absorbed, a long prefill expanded.
    """

    #: 0-based, of the layer.
    index: int
    #: Of the scores, in both forms.
    scale: float

    def absorb(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [..., h, n + r] -> what meets a latent row [..., h, R], and what meets a shared key part [..., h,
        r]."""
        ...

    def raise_values(self, o: Tensor) -> Tensor:
        """Sums of latent rows [..., h, R] -> sums of values [..., h, v]."""
        ...

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Latent rows [..., R] -> keys [..., h, n] without their shared part, and values [..., h, v]."""
        ...


class Attention(Protocol):
    """One forward pass over one batch, as the keeper of the caches sees it. The model owns projections, gates and
    norms."""

    def mla(self, layer: LatentProjections, q: Tensor, kv_latent: Tensor, k_rope: Tensor) -> Tensor:
        """Write the cache rows kv_latent [T, R] | k_rope [T, r], attend over the cache with q [T, h, n + r], return [T,
        h, v].

        In either form, or in both: an engine whose batches hold decoding sequences first may absorb their rows and
        expand the rest.
        """
        ...

    def kda(self, layer: int, rule: DeltaRule, mixed_qkv: Tensor, forget_gate: Tensor, beta: Tensor) -> Tensor:
        """mixed_qkv [T, 3hd] before the short convolution, forget_gate [T, h, d] and beta [T, h] raw; returns [T, h,
        d].

        The implementation owns the convolution windows and the fp32 states of 0-based `layer`; `rule` has its weights.
        """
        ...


class CachedAttention:
    """The torch implementation over a `ModelCache`, for one forward pass of some of its sequences.

    Call `commit()` after the pass; until then a sequence's length has not grown, and no other pass may change it, since
    KDA states are changed in place. `form` picks the MLA form, and
    `kda_form` whether prefill runs token by token or in chunks; "auto" takes the cheaper.
    """

    def __init__(
        self,
        cache: ModelCache,
        slots: Sequence[int],
        query_lens: Sequence[int],
        *,
        form: Literal["auto", "absorbed", "expanded"] = "auto",
        kda_form: KdaForm = "auto",
    ) -> None:
        self.cache, self.slots, self.query_lens = cache, list(slots), list(query_lens)
        self.kv_lens = [cache.length(slot) + n for slot, n in zip(self.slots, self.query_lens, strict=True)]
        cache.check_room(self.slots, self.kv_lens)
        self._kda_form = kda_form
        self._expanded = (
            _expanding_is_cheaper(cache, self.query_lens, self.kv_lens) if form == "auto" else form == "expanded"
        )
        self._own = _slice_or_index(self.slots, cache.device)
        ends = ((slot * cache.capacity + end, n) for slot, n, end in zip(slots, query_lens, self.kv_lens, strict=True))
        rows = [row for end, n in ends for row in range(end - n, end)]
        self._rows = torch.tensor(rows, dtype=torch.long, device=cache.device)
        self._layers_run: set[int] = set()

    @property
    def is_decoding_everyone(self) -> bool:
        """Whether this is a pass of one token for each slot of the cache, in order, none of them the first."""
        return (
            self.slots == list(range(self.cache.num_slots))
            and all(n == 1 for n in self.query_lens)
            and min(self.kv_lens, default=1) > 1
        )

    @property
    def last_rows(self) -> list[int]:
        """The batch row of each sequence's last token."""
        return [end - 1 for end in accumulate(self.query_lens)]

    def begin(self) -> None:
        """Tell the cache that its sequences are about to change. The first layer does it; a pass in another form, over
        the same cache, calls it itself. Raises ValueError when an earlier pass over one of them was not committed."""
        changed = [(slot, end - n) for slot, n, end in zip(self.slots, self.query_lens, self.kv_lens, strict=True) if n]
        self.cache.begin([slot for slot, _ in changed], [length for _, length in changed])

    def commit(self) -> None:
        """Let the sequences' lengths count the tokens of this pass."""
        self.cache.advance(self.slots, self.kv_lens)

    def mla(self, layer: LatentProjections, q: Tensor, kv_latent: Tensor, k_rope: Tensor) -> Tensor:
        latent, rope = self._write(layer.index, kv_latent, k_rope)
        if not self._expanded:
            batch = (self.slots, self.query_lens, self.kv_lens)
            return layer.raise_values(latent_attention(*layer.absorb(q), latent, rope, *batch, layer.scale))
        if self.kv_lens != self.query_lens:  # some sequence has a cached prefix: take its rows back from the cache
            filled = list(zip(self.slots, self.kv_lens, strict=True))
            kv_latent = torch.cat([latent[slot, :n] for slot, n in filled])
            k_rope = torch.cat([rope[slot, :n] for slot, n in filled])
        keys, values = layer.expand(kv_latent)
        shared = k_rope.unsqueeze(1).expand(-1, keys.shape[1], -1)  # [Tk, h, r]
        keys = torch.cat([keys, shared], dim=-1)
        return causal_attention(q, keys, values, self.query_lens, self.kv_lens, layer.scale)

    def kda(self, layer: int, rule: DeltaRule, mixed_qkv: Tensor, forget_gate: Tensor, beta: Tensor) -> Tensor:
        self._enter(layer)
        pools = StatePools(*self.cache.kda_pools(layer), self._own)
        return rule.over_pools(mixed_qkv, forget_gate, beta, pools, self.query_lens, self._kda_form)

    def _write(self, layer: int, kv_latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        self._enter(layer)
        latent, rope = self.cache.mla_pools(layer)
        latent.view(-1, latent.shape[-1]).index_copy_(0, self._rows, kv_latent.to(latent.dtype))
        rope.view(-1, rope.shape[-1]).index_copy_(0, self._rows, k_rope.to(rope.dtype))
        return latent, rope

    def _enter(self, layer: int) -> None:
        if layer in self._layers_run:
            raise ValueError(
                f"layer {layer} has run in this pass already; a CachedAttention serves one pass, so make another for "
                "the next"
            )
        if not self._layers_run:
            self.begin()
        self._layers_run.add(layer)


def _slice_or_index(slots: Sequence[int], device: torch.device) -> slice | Tensor:
    """What picks the slots from a pool: a view of it where they follow one another, else a copy."""
    if consecutive(slots):
        return slice(slots[0], slots[0] + len(slots))
    return torch.tensor(slots, dtype=torch.long, device=device)


def _expanding_is_cheaper(cache: ModelCache, query_lens: Sequence[int], kv_lens: Sequence[int]) -> bool:
    """Compare multiply-adds per head: absorbed pays more per query-key pair, expanded pays to make every key and
    value."""
    c = cache.config
    pairs = sum(n * length for n, length in zip(query_lens, kv_lens, strict=True))
    absorbed = pairs * (2 * c.kv_lora_rank + c.qk_rope_head_dim)
    making = sum(kv_lens) * c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim)
    return pairs * (c.qk_head_dim + c.v_head_dim) + making < absorbed
