"""The text model gives the published code's logits, in every form of its attention, alone and in a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from kimi_k3_npu.model.attention import CachedAttention
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
from kimi_k3_npu.model.experts import Experts

if TYPE_CHECKING:
    from tests.conftest import Oracle

#: Of logits between -5 and 5, fp32. The published equations in another order of summation differ by up to 3e-4.
TOLERANCE = 5e-4

TEXT = ("k3", "k3-deep", "k3-mxfp4", "k3-router", "kimi-linear", "kimi-linear-flat")
FORMS = [
    pytest.param({"form": form, "kda_form": kda_form}, id=f"{form}-{kda_form}")
    for form in ("absorbed", "expanded")
    for kda_form in ("recurrent", "chunk")
]


@torch.inference_mode()
def logits(model: KimiK3ForCausalLM, prompts: Sequence[Tensor], **forms: Any) -> list[Tensor]:
    """As `model.score`, with the forms of attention chosen."""
    lengths = [len(prompt) for prompt in prompts]
    cache = model.new_cache(len(prompts), max(lengths))
    attention = CachedAttention(cache, [cache.join() for _ in prompts], lengths, **forms)
    return list(model.logits(model(torch.cat(list(prompts)), attention)).split(lengths))


def assert_close(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", TEXT)
def test_each_prompt_alone(oracle: Callable[[str], Oracle], name: str) -> None:
    expected = oracle(name).expected
    model = oracle(name).model
    assert_close([model.score([prompt])[0] for prompt in expected.prompts], expected.logits)


@pytest.mark.parametrize("name", TEXT)
def test_all_prompts_in_one_ragged_batch(oracle: Callable[[str], Oracle], name: str) -> None:
    expected = oracle(name).expected
    assert_close(oracle(name).model.score(expected.prompts), expected.logits)


@pytest.mark.parametrize("forms", FORMS)
@pytest.mark.parametrize("name", TEXT)
def test_every_form_of_attention(oracle: Callable[[str], Oracle], name: str, forms: dict[str, str]) -> None:
    expected = oracle(name).expected
    assert_close(logits(oracle(name).model, expected.prompts, **forms), expected.logits)


@pytest.mark.parametrize("name", TEXT)
def test_greedy_tokens_through_the_cache(oracle: Callable[[str], Oracle], name: str) -> None:
    model, expected = oracle(name).model, oracle(name).expected
    cache = model.new_cache(len(expected.prompts), max(map(len, expected.prompts)) + 8)
    slots = [cache.join() for _ in expected.prompts]
    tokens, generated = list(expected.prompts), []
    with torch.inference_mode():
        for _ in range(8):
            attention = CachedAttention(cache, slots, [len(part) for part in tokens])
            hidden = model(torch.cat(tokens), attention)
            attention.commit()
            chosen = model.logits(hidden[attention.last_rows]).argmax(dim=-1)
            tokens = list(chosen.split(1))
            generated.append(chosen)
    assert torch.equal(torch.stack(generated, dim=1), torch.stack(expected.greedy8))


def test_packed_and_expanded_mxfp4_experts(oracle: Callable[[str], Oracle]) -> None:
    expected, folder = oracle("k3-mxfp4").expected, oracle("k3-mxfp4").folder
    packed = oracle("k3-mxfp4").load(folder, expert_weights="packed")
    expanded = oracle("k3-mxfp4").load(folder, expert_weights="bf16")
    kinds = {module.format.name for module in packed.modules() if isinstance(module, Experts)}
    assert kinds == {"mxfp4"}
    kinds = {module.format.name for module in expanded.modules() if isinstance(module, Experts)}
    assert kinds == {"plain"}
    assert_close(packed.score(expected.prompts), expected.logits)
    assert_close(expanded.score(expected.prompts), expected.logits)
    for a, b in zip(packed.score(expected.prompts), expanded.score(expected.prompts), strict=True):
        assert torch.equal(a, b)  # the same weights, multiplied in the same order
