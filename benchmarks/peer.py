"""The peer of the speed benchmarks: transformers' KimiLinear and this package's model with the same weights.

The peer has no residual mixing, no latent experts and the unbounded gate; sizes are those of a small Kimi-Linear:
hidden 256, 8 layers (6 KDA, 2 MLA), 4 heads of 64, 16 experts of which 4, fp32, vocabulary 1024.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from transformers import KimiLinearConfig, KimiLinearForCausalLM

from kimi_k3_npu import KimiK3ForCausalLM, load_model

SIZES = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 128,
    "q_lora_rank": None,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "linear_head_dim": 64,
    "linear_num_heads": 4,
    "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(8)],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def pair(seed: int = 0) -> tuple[KimiLinearForCausalLM, KimiK3ForCausalLM]:
    """The peer with random weights, and our model loaded from what the peer saves."""
    torch.manual_seed(seed)
    peer = KimiLinearForCausalLM(KimiLinearConfig(**SIZES, dtype="float32")).eval()
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            if name.endswith("e_score_correction_bias"):
                parameter.zero_()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer.save_pretrained(folder)
        return peer, load_model(Path(folder))


def alternate(first: Callable[[], object], second: Callable[[], object], runs: int = 5) -> tuple[float, float]:
    """Median seconds of each, their runs alternated so that a change in the machine's load meets both alike."""
    for warm_up in (first, second):
        warm_up()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(runs):
        for timed, run in zip(times, (first, second), strict=True):
            start = perf_counter()
            run()
            timed.append(perf_counter() - start)
    return median(times[0]), median(times[1])
