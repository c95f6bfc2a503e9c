"""An engine's caches behind the attention protocol: pages under block tables that nobody clears, and passes that mix
decoding requests, whose rows are absorbed, with prefills, whose rows are expanded. States are [h, V, K]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from kimi_k3_npu.config import TextConfig
from kimi_k3_npu.model.attention import LatentProjections
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
from kimi_k3_npu.model.delta_rule import DeltaRule, StatePools
from kimi_k3_npu.ops.attention import causal_attention

if TYPE_CHECKING:
    from tests.conftest import Oracle

TOLERANCE = 5e-4
PAGE, PAGES = 16, 20
#: Requests that run at once; each has a state block.
SEATS = 2
#: Rows of a prefill in one pass, and how many of a prompt's last tokens run one at a time.
CHUNK, DECODED = 13, 8
NAN = float("nan")


@dataclass(eq=False)
class Request:
    """A prompt of which `done` tokens have run; `table` names its pages and `seat` its state block."""

    tokens: Tensor
    seat: int = -1
    table: list[int] = field(default_factory=list)
    done: int = 0
    logits: list[Tensor] = field(default_factory=list)

    @property
    def is_decoding(self) -> bool:
        return self.done > 0 and len(self.tokens) - self.done <= DECODED

    @property
    def count(self) -> int:
        """Tokens of its next pass."""
        return 1 if self.is_decoding else min(CHUNK, max(1, len(self.tokens) - self.done - DECODED))

    def rows(self, start: int, stop: int) -> list[int]:
        """Where the rows of these tokens are in the pool."""
        return [self.table[t // PAGE] * PAGE + t % PAGE for t in range(start, stop)]


class Blocks:
    """The memory that requests borrow, of all layers: [PAGES * PAGE, R + r], and windows and states of each seat."""

    def __init__(self, config: TextConfig) -> None:
        width = config.kv_lora_rank + config.qk_rope_head_dim
        self.mla = {layer: torch.full((PAGES * PAGE, width), NAN) for layer in config.mla_layers}
        h, d, W = config.kda_num_heads, config.kda_head_dim, config.short_conv_kernel_size
        shapes = (SEATS, W - 1, 3 * h * d), (SEATS, h, d, d)
        self.kda = {layer: tuple(torch.full(shape, NAN) for shape in shapes) for layer in config.kda_layers}
        self.pages, self.seats = list(range(PAGES)), list(range(SEATS))

    def lend(self, request: Request) -> None:
        """What the request's next pass needs more."""
        if not request.done:
            request.seat = self.seats.pop()
        while len(request.table) * PAGE < request.done + request.count:
            request.table.append(self.pages.pop(0))

    def take_back(self, request: Request) -> None:
        self.seats.append(request.seat)
        self.pages.extend(request.table)


class EngineAttention:
    """One pass of some requests, those that decode first: their rows absorbed, the others' expanded."""

    def __init__(self, blocks: Blocks, requests: Sequence[Request]) -> None:
        self.blocks, self.requests = blocks, requests
        self.decoding = sum(request.is_decoding for request in requests)
        assert all(request.is_decoding for request in requests[: self.decoding])
        self.counts = [request.count for request in requests]
        self.new_rows = [row for r in requests for row in r.rows(r.done, r.done + r.count)]

    def mla(self, layer: LatentProjections, q: Tensor, kv_latent: Tensor, k_rope: Tensor) -> Tensor:
        self.blocks.mla[layer.index][self.new_rows] = torch.cat([kv_latent, k_rope], dim=-1)
        n, R = self.decoding, kv_latent.shape[-1]  # a decoding request has one row

        rows = self._history(layer, slice(n)).unsqueeze(1).expand(-1, q.shape[1], -1)  # [Tk, h, R + r]
        o = self._attend(layer, slice(n), torch.cat(layer.absorb(q[:n]), dim=-1), rows, rows[..., :R])
        absorbed = layer.raise_values(o)

        latent, rope = self._history(layer, slice(n, None)).tensor_split([R], dim=-1)
        keys, values = layer.expand(latent)
        keys = torch.cat([keys, rope.unsqueeze(1).expand(-1, q.shape[1], -1)], dim=-1)
        return torch.cat([absorbed, self._attend(layer, slice(n, None), q[n:], keys, values)])

    def kda(self, layer: int, rule: DeltaRule, mixed_qkv: Tensor, forget_gate: Tensor, beta: Tensor) -> Tensor:
        seats, fresh = torch.tensor([(request.seat, not request.done) for request in self.requests]).unbind(1)
        pools = StatePools(*self.blocks.kda[layer], seats, fresh.bool(), transposed=True)
        return rule.over_pools(mixed_qkv, forget_gate, beta, pools, self.counts)

    def _history(self, layer: LatentProjections, which: slice) -> Tensor:
        """The rows of these requests' tokens so far, [Tk, R + r]."""
        return self.blocks.mla[layer.index][[row for r in self.requests[which] for row in r.rows(0, r.done + r.count)]]

    def _attend(self, layer: LatentProjections, which: slice, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        lengths = [request.done + request.count for request in self.requests[which]]
        return causal_attention(q, keys, values, self.counts[which], lengths, layer.scale)


def serve(model: KimiK3ForCausalLM, prompts: Sequence[Tensor]) -> tuple[list[Tensor], int]:
    """Every prompt's logits, in passes to which one waiting prompt at a time is added, and how many were mixed."""
    blocks, mixed = Blocks(model.config.text), 0
    every = [Request(prompt) for prompt in prompts]
    waiting, running = list(every), []
    while waiting or running:
        if waiting and blocks.seats:
            running.append(waiting.pop(0))
        running.sort(key=lambda request: not request.is_decoding)
        for request in running:
            blocks.lend(request)
        attention = EngineAttention(blocks, running)
        tokens = torch.cat([r.tokens[r.done : r.done + r.count] for r in running])
        logits = model.logits(model(tokens, attention)).split(attention.counts)
        mixed += 0 < attention.decoding < len(running)
        for request, part in zip(running, logits, strict=True):
            request.logits.append(part)
            request.done += len(part)
        for request in [r for r in running if r.done == len(r.tokens)]:
            blocks.take_back(request)
            running.remove(request)
    return [torch.cat(request.logits) for request in every], mixed


@pytest.mark.parametrize("name", ["k3", "k3-deep", "kimi-linear"])
@torch.inference_mode()
def test_passes_that_mix_both_forms(oracle: Callable[[str], Oracle], name: str) -> None:
    expected = oracle(name).expected
    logits, mixed = serve(oracle(name).model, 3 * expected.prompts)
    assert mixed >= 2
    for found, wanted in zip(logits, 3 * expected.logits, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)
