"""How fast is a prompt read, beside transformers' KimiLinear with the same weights?

Both give the logits after the last token of one prompt; they must agree. Tokens a second, medians of alternated runs.
The bounded gate, which the peer does not have, is compared with this package's own recurrence, token by token: in the
whole model, and the operator of one layer alone.

    python benchmarks/prefill.py [--tokens 512] [--threads 1,2] [--runs 5] [--out FILE]
"""

from __future__ import annotations

from typing import Any

import torch
from peer import EXPERTS, SIZES, VOCABULARY, alternate, pair, prefill
from report import finish, options

from kimi_k3_npu.model.kda import KimiDeltaAttention
from kimi_k3_npu.ops.kda import kda_gate, kda_recurrent, l2_norm
from kimi_k3_npu.ops.kda_chunk import kda_chunk

#: What the gates of Kimi-K3 are bounded by.
BOUND = -5.0
TOLERANCE = 1e-4


def against_the_peer(experts: str, tokens: int, runs: int) -> dict[str, Any]:
    peer, ours = pair(experts)
    ids = torch.randint(3, VOCABULARY, (tokens,))
    sides = (lambda: peer(ids[None], use_cache=True, logits_to_keep=1).logits[0, 0]), (lambda: prefill(ours, ids))
    return _row(experts, "unbounded", "KimiLinear", tokens, sides, runs)


def against_the_recurrence(experts: str, tokens: int, runs: int) -> dict[str, Any]:
    _, ours = pair(experts)
    for layer in ours.modules():
        if isinstance(layer, KimiDeltaAttention):
            layer.gate_lower_bound = BOUND
    ids = torch.randint(3, VOCABULARY, (tokens,))
    sides = (lambda: prefill(ours, ids, kda_form="recurrent")), (lambda: prefill(ours, ids))
    return _row(experts, "bounded", "own recurrence", tokens, sides, runs)


def operators(tokens: int, runs: int) -> dict[str, Any]:
    """One layer's delta rule: its two forms on the same inputs, as the model would make them."""
    heads, d = SIZES["num_attention_heads"], SIZES["linear_head_dim"]
    q, k = l2_norm(torch.randn(tokens, heads, d)) * d**-0.5, l2_norm(torch.randn(tokens, heads, d))
    g = kda_gate(torch.randn(tokens, heads, d), torch.zeros(heads), torch.zeros(heads, d), BOUND)
    rest = (torch.randn(tokens, heads, d), g, torch.rand(tokens, heads), torch.zeros(1, heads, d, d), [tokens])
    sides = (lambda: kda_recurrent(q, k, *rest)[0]), (lambda: kda_chunk(q, k, *rest)[0])
    return _row("one KDA operator", "bounded", "own recurrence", tokens, sides, runs)


def _row(experts: str, gate: str, other: str, tokens: int, sides: tuple[Any, Any], runs: int) -> dict[str, Any]:
    difference = (sides[0]() - sides[1]()).abs().max().item()
    assert difference < TOLERANCE, f"results differ by {difference}, at most {TOLERANCE} was expected"
    theirs, ours = alternate(*sides, runs)
    return {
        "experts": experts,
        "gate": gate,
        "beside": other,
        "threads": torch.get_num_threads(),
        "tokens": tokens,
        "its_tokens_per_s": tokens / theirs,
        "ours": tokens / ours,
        "ratio": theirs / ours,
        "results_differ": difference,
    }


@torch.inference_mode()
def main() -> None:
    parser = options(__doc__, "prefill")
    parser.add_argument("--tokens", default="512")
    parser.add_argument("--threads", default="1,2")
    chosen = parser.parse_args()
    rows = []
    for threads in map(int, chosen.threads.split(",")):
        torch.set_num_threads(threads)
        for experts in EXPERTS:
            rows += [against_the_peer(experts, int(tokens), chosen.runs) for tokens in chosen.tokens.split(",")]
        rows.append(against_the_recurrence(next(iter(EXPERTS)), 512, chosen.runs))
        rows.append(operators(512, chosen.runs))
    finish(chosen, rows)


if __name__ == "__main__":
    main()
