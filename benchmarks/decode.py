"""How fast are tokens generated, beside transformers' KimiLinear with the same weights?

Greedy, 64 tokens after prompts of 16, alone and eight at a time; both must choose the same tokens. Milliseconds a step,
medians of alternated runs.

    python benchmarks/decode.py [--batches 1,8] [--threads 1,2] [--runs 5] [--out FILE]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peer import EXPERTS, VOCABULARY, alternate, pair
from report import finish, options
from torch import Tensor
from transformers import KimiLinearForCausalLM

from kimi_k3_npu import KimiK3ForCausalLM
from kimi_k3_npu.model.attention import CachedAttention

PROMPT, STEPS = 16, 64


def peer_steps(model: KimiLinearForCausalLM, ids: Tensor) -> Callable[[], Tensor]:
    """ids [S, PROMPT] -> a function that generates the next STEPS tokens of each, [STEPS, S], time and again."""
    out = model(ids, use_cache=True, logits_to_keep=1)
    cache, token = out.past_key_values, out.logits[:, -1].argmax(-1)

    def step(token: Tensor) -> Tensor:
        out = model(token[:, None], past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1)

    return repeated(step, token)


def our_steps(model: KimiK3ForCausalLM, ids: Tensor, capacity: int) -> Callable[[], Tensor]:
    """The same by this package."""
    batch = len(ids)
    cache = model.new_cache(batch, capacity)
    slots = [cache.join() for _ in range(batch)]

    def forward(tokens: Tensor, count: int) -> Tensor:
        attention = CachedAttention(cache, slots, [count] * batch)
        hidden = model(tokens, attention)[attention.last_rows]
        attention.commit()
        return model.logits(hidden).argmax(-1)

    return repeated(lambda token: forward(token, 1), forward(ids.flatten(), PROMPT))


def repeated(step: Callable[[Tensor], Tensor], token: Tensor) -> Callable[[], Tensor]:
    """A function that takes STEPS steps, each from the token that the last one chose, and returns what was chosen."""

    def steps() -> Tensor:
        nonlocal token
        chosen = []
        for _ in range(STEPS):
            token = step(token)
            chosen.append(token)
        return torch.stack(chosen)

    return steps


def measure(experts: str, batch: int, runs: int) -> dict[str, Any]:
    peer, ours = pair(experts)
    ids = torch.randint(3, VOCABULARY, (batch, PROMPT))
    capacity = PROMPT + STEPS * (runs + 2)
    theirs, mine = peer_steps(peer, ids), our_steps(ours, ids, capacity)
    assert torch.equal(theirs(), mine()), "the two models chose different tokens"
    their_time, our_time = alternate(theirs, mine, runs)
    return {
        "experts": experts,
        "threads": torch.get_num_threads(),
        "batch": batch,
        "its_ms_per_step": 1e3 * their_time / STEPS,
        "ours": 1e3 * our_time / STEPS,
        "ratio": their_time / our_time,
    }


@torch.inference_mode()
def main() -> None:
    parser = options(__doc__, "decode")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--threads", default="1,2")
    chosen = parser.parse_args()
    rows = []
    for threads in map(int, chosen.threads.split(",")):
        torch.set_num_threads(threads)
        for experts in EXPERTS:
            rows += [measure(experts, int(batch), chosen.runs) for batch in chosen.batches.split(",")]
    finish(chosen, rows)


if __name__ == "__main__":
    main()
