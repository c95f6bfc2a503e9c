"""How fast are tokens generated, beside transformers' KimiLinear with the same weights?

Greedy, 64 tokens after prompts of 16 and of 512, alone and eight at a time, each run from the prompts' end; all must
choose the same tokens. Milliseconds a step, medians of alternated runs; "compiled" is our step as one graph
(`KimiK3ForGeneration.compile_decoding`), which needs a C++ compiler.

    python benchmarks/decode.py [--batches 1,8] [--prompts 16,512] [--threads 1,2] [--runs 5] [--eager] [--out FILE]
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from statistics import median
from time import perf_counter
from typing import Any

import torch
from peer import EXPERTS, VOCABULARY, pair
from report import finish, options
from torch import Tensor
from transformers import KimiLinearForCausalLM

from kimi_k3_npu import KimiK3ForCausalLM
from kimi_k3_npu.model.attention import CachedAttention
from kimi_k3_npu.model.fixed import decode_step, reach_of

STEPS = 64
#: tokens [S] -> the next ones
Step = Callable[[Tensor], Tensor]
#: Reads the prompts: the step that goes on from there, and its first tokens.
Start = Callable[[], tuple[Step, Tensor]]


def peer(model: KimiLinearForCausalLM, ids: Tensor) -> Start:
    """ids [S, T]."""
    prompts = model(ids, use_cache=True, logits_to_keep=1)

    def start() -> tuple[Step, Tensor]:
        cache = deepcopy(prompts.past_key_values)

        def step(tokens: Tensor) -> Tensor:
            out = model(tokens[:, None], past_key_values=cache, use_cache=True, logits_to_keep=1)
            return out.logits[:, -1].argmax(-1)

        return step, prompts.logits[:, -1].argmax(-1)

    return start


def ours(model: KimiK3ForCausalLM, ids: Tensor, *, compiled: bool) -> Start:
    """ids [S, T]; with `compiled`, the step is captured by the first call."""
    batch, length = ids.shape
    captured = torch.compile(decode_step) if compiled else None

    def start() -> tuple[Step, Tensor]:
        cache = model.new_cache(batch, length + STEPS)
        slots = [cache.join() for _ in range(batch)]

        def forward(tokens: Tensor, count: int) -> Tensor:
            attention = CachedAttention(cache, slots, [count] * batch)
            if captured is not None and count == 1:
                lengths = torch.tensor(attention.kv_lens) - 1
                logits = captured(model, cache, tokens, lengths, reach_of(length + STEPS, cache.capacity))
            else:
                logits = model.logits(model(tokens, attention)[attention.last_rows])
            attention.commit()
            return logits.argmax(-1)

        return lambda tokens: forward(tokens, 1), forward(ids.flatten(), length)

    return start


def timed(start: Start) -> tuple[float, Tensor]:
    """Seconds for STEPS steps, and the tokens [STEPS, S] that they chose."""
    step, tokens = start()
    chosen = []
    begin = perf_counter()
    for _ in range(STEPS):
        tokens = step(tokens)
        chosen.append(tokens)
    return perf_counter() - begin, torch.stack(chosen)


def measure(experts: str, batch: int, prompt: int, runs: int, *, eager: bool) -> dict[str, Any]:
    theirs, model = pair(experts)
    ids = torch.randint(3, VOCABULARY, (batch, prompt))
    starts = {"peer": peer(theirs, ids), "ours": ours(model, ids, compiled=False)}
    if not eager:
        starts["compiled"] = ours(model, ids, compiled=True)
    expected = timed(starts["peer"])[1]
    for name, start in starts.items():
        assert torch.equal(timed(start)[1], expected), f"the peer and {name} chose different tokens"
    times: dict[str, list[float]] = {name: [] for name in starts}
    for _ in range(runs):
        for name, start in starts.items():
            times[name].append(timed(start)[0])
    steps = {name: 1e3 * median(seconds) / STEPS for name, seconds in times.items()}
    row = {
        "experts": experts,
        "threads": torch.get_num_threads(),
        "batch": batch,
        "prompt": prompt,
        "its_ms_per_step": steps["peer"],
        "ours": steps["ours"],
        "ratio": steps["peer"] / steps["ours"],
    }
    return row if eager else row | {"compiled": steps["compiled"], "its_ratio": steps["peer"] / steps["compiled"]}


@torch.inference_mode()
def main() -> None:
    parser = options(__doc__, "decode")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--prompts", default="16,512")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--eager", action="store_true", help="leave the compiled step out")
    chosen = parser.parse_args()
    rows = []
    for threads in map(int, chosen.threads.split(",")):
        torch.set_num_threads(threads)
        for experts in EXPERTS:
            for prompt in map(int, chosen.prompts.split(",")):
                for batch in map(int, chosen.batches.split(",")):
                    torch.compiler.reset()
                    rows.append(measure(experts, batch, prompt, chosen.runs, eager=chosen.eager))
    finish(chosen, rows)


if __name__ == "__main__":
    main()
