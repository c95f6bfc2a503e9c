"""The peer of the speed benchmarks: transformers' KimiLinear, and this package's model with the same weights.

Hidden 256, 8 layers (6 KDA, 2 MLA), 4 heads of 64, fp32, vocabulary 1024. The peer has no residual mixing, no latent
experts and the unbounded gate. EXPERTS are the sizes of the mixture of experts, smallest first: the more of the time
goes into the products of matrices that both models do alike, the closer they are.
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
from kimi_k3_npu.model.attention import CachedAttention

VOCABULARY = 1024
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 128,
    "q_lora_rank": None,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_shared_experts": 1,
    "linear_head_dim": 64,
    "linear_num_heads": 4,
    "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(8)],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
#: "of how many, how many per token, how wide"
EXPERTS = {"8, 2 a token, 64 wide": (8, 2, 64), "16, 4 a token, 128 wide": (16, 4, 128)}


def pair(experts: str, seed: int = 0) -> tuple[KimiLinearForCausalLM, KimiK3ForCausalLM]:
    """The peer with random weights and the experts named in EXPERTS, and our model loaded from what the peer saves."""
    count, per_token, width = EXPERTS[experts]
    sizes = {"num_local_experts": count, "num_experts_per_tok": per_token, "moe_intermediate_size": width}
    torch.manual_seed(seed)
    peer = KimiLinearForCausalLM(KimiLinearConfig(**SIZES, **sizes, dtype="float32")).eval()
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            if name.endswith("e_score_correction_bias"):
                parameter.zero_()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer.save_pretrained(folder)
        return peer, load_model(Path(folder))


def prefill(model: KimiK3ForCausalLM, ids: torch.Tensor, **form: str) -> torch.Tensor:
    """ids [T] -> logits [vocab] after the last one, with a fresh cache; `form` as of CachedAttention."""
    cache = model.new_cache(1, len(ids))
    attention = CachedAttention(cache, [cache.join()], [len(ids)], **form)
    return model.logits(model(ids, attention)[-1:])[0]


def alternate(first: Callable[[], object], second: Callable[[], object], runs: int) -> tuple[float, float]:
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
