"""Our own cache: latent rows of the MLA layers, convolution windows and fp32 states of the KDA layers, one slot a
sequence.

Memory is reserved once. A slot's rows are contiguous and its capacity a multiple of PAGE, so the same memory can be
read as a paged cache whose block table is simply consecutive. What a sequence leaves behind is cleared when it
leaves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kimi_k3_npu.config import TextConfig
from kimi_k3_npu.parallel.groups import Group

#: Rows of a page; the paged attention operators of the NPU take 16 or 128.
PAGE = 128


class ModelCache:
    """Room for `num_slots` sequences of up to `max_tokens` tokens each.

    Per slot and layer: MLA [capacity, R] + [capacity, r] in `dtype`; KDA a window [W - 1, 3hd] in `dtype` and a state
    [h, d, d] in fp32, with h the heads of this rank of `attn_tp`.
    """

    def __init__(
        self,
        config: TextConfig,
        num_slots: int,
        max_tokens: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        attn_tp: Group | None = None,
    ) -> None:
        self.config, self.num_slots, self.device = config, num_slots, torch.device(device)
        self.capacity = whole_pages(max_tokens)
        self._lengths = [0] * num_slots
        self._free = list(reversed(range(num_slots)))
        self._open: set[int] = set()
        heads = config.kda_num_heads // (attn_tp.size if attn_tp else 1)
        d, R, r, W = config.kda_head_dim, config.kv_lora_rank, config.qk_rope_head_dim, config.short_conv_kernel_size

        def pool(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(num_slots, *shape, dtype=dtype, device=device)

        # One tensor a layer: a captured graph copies all of a tensor that it writes a part of.
        self._mla = {layer: (pool(self.capacity, R), pool(self.capacity, r)) for layer in config.mla_layers}
        self._kda = {
            layer: (pool(W - 1, 3 * heads * d), pool(heads, d, d, dtype=torch.float32)) for layer in config.kda_layers
        }

    def pools(self) -> list[Tensor]:
        """All memory of this cache; the first dimension of each tensor is the slot."""
        return [pool for pair in (*self._mla.values(), *self._kda.values()) for pool in pair]

    def join(self) -> int:
        """Give a new sequence a slot, empty of any earlier one. Raises ValueError when all are taken."""
        if not self._free:
            raise ValueError(f"all {self.num_slots} cache slots are taken; free one or make the cache with more slots")
        return self._free.pop()

    def leave(self, slot: int) -> None:
        """Free a slot and clear it: also of what a pass that was never committed wrote past the sequence's length."""
        for pool in self.pools():
            pool[slot] = 0
        self._lengths[slot] = 0
        self._open.discard(slot)
        self._free.append(slot)

    def length(self, slot: int) -> int:
        """Tokens of the slot's sequence so far."""
        return self._lengths[slot]

    def check_room(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Raises ValueError when a sequence would outgrow its slot."""
        for slot, length in zip(slots, lengths, strict=True):
            if length > self.capacity:
                raise ValueError(
                    f"sequence in cache slot {slot} would reach {length} tokens, but a slot holds {self.capacity}; "
                    "make the cache with a larger max_tokens"
                )

    def begin(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Note that a pass is about to change `slots`, which should hold `lengths` tokens; `advance` ends it.

        Raises ValueError where that would go wrong unseen: a KDA state is changed in place, so what a pass that never
        ended has done to it cannot be taken back.
        """
        for slot, length in zip(slots, lengths, strict=True):
            if slot in self._open:
                raise ValueError(
                    f"cache slot {slot}: an earlier pass began to change its KDA state and was never committed; free "
                    "the slot with leave() and run its sequence again from the start"
                )
            if length != self._lengths[slot]:
                raise ValueError(
                    f"cache slot {slot} holds {self._lengths[slot]} tokens, but this pass was made when it held "
                    f"{length}; make its CachedAttention after the pass before it is committed"
                )
        self._open.update(slots)

    def advance(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Let the sequences in `slots` have `lengths` tokens; their pass is over."""
        self._open.difference_update(slots)
        for slot, length in zip(slots, lengths, strict=True):
            self._lengths[slot] = length

    def mla_pools(self, layer: int) -> tuple[Tensor, Tensor]:
        """Latent rows [slots, capacity, R] and shared key rows [slots, capacity, r] of 0-based `layer`."""
        return self._mla[layer]

    def kda_pools(self, layer: int) -> tuple[Tensor, Tensor]:
        """Windows [slots, W - 1, 3hd] and states [slots, h, d, d] of 0-based `layer`."""
        return self._kda[layer]

    def reorder(self, order: Sequence[int]) -> None:
        """Let slot i continue as a copy of what slot order[i] holds now (beam search). All slots must be taken."""
        if self._free or len(order) != self.num_slots:
            taken = self.num_slots - len(self._free)
            raise ValueError(
                f"an order of {len(order)} for {self.num_slots} slots, {taken} taken; all must be, and named"
            )
        index = torch.tensor(order, device=self.device)
        for pool in self.pools():
            pool.copy_(pool.index_select(0, index))
        self._lengths = [self._lengths[slot] for slot in order]
        self._open = {slot for slot, source in enumerate(order) if source in self._open}

    def grow(self, max_tokens: int) -> None:
        """Make room for `max_tokens` tokens a sequence. Attentions made before are not to be used any more."""
        capacity = whole_pages(max_tokens)
        # All or nothing: memory that runs out half way leaves the cache as it was.
        self._mla = {
            layer: (_longer(latent, capacity), _longer(rope, capacity)) for layer, (latent, rope) in self._mla.items()
        }
        self.capacity = capacity


def whole_pages(tokens: int) -> int:
    """Rows of the pages that `tokens` tokens take; a slot has at least one page."""
    return max(PAGE, -(-tokens // PAGE) * PAGE)


def _longer(pool: Tensor, capacity: int) -> Tensor:
    """pool [slots, rows, width] with zeros after its rows, [slots, capacity, width]."""
    longer = pool.new_zeros(pool.shape[0], capacity, pool.shape[2])
    longer[:, : pool.shape[1]] = pool
    return longer
