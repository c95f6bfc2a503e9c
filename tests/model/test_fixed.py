"""The decode step in fixed shapes: the same numbers as the ragged pass, as one graph, and behind `generate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from kimi_k3_npu.engines.transformers import KimiK3ForGeneration
from kimi_k3_npu.errors import KimiK3Error
from kimi_k3_npu.model.attention import CachedAttention
from kimi_k3_npu.model.cache import PAGE, ModelCache
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
from kimi_k3_npu.model.fixed import decode_step, reach_of

if TYPE_CHECKING:
    from tests.conftest import Oracle

LENGTHS = [5, 1, PAGE - 2]
STEPS = 4  # past the page


def begin(model: KimiK3ForCausalLM, lengths: list[int]) -> tuple[ModelCache, Tensor]:
    """A cache with prompts of these lengths, and the likeliest next token of each, [S]."""
    cache = model.new_cache(len(lengths), 2 * PAGE)
    attention = CachedAttention(cache, [cache.join() for _ in lengths], lengths)
    ids = torch.arange(sum(lengths)) * 7 % model.config.text.vocab_size
    hidden = model(ids, attention)[attention.last_rows]
    attention.commit()
    return cache, model.logits(hidden).argmax(-1)


def ragged(model: KimiK3ForCausalLM, cache: ModelCache, tokens: Tensor) -> Tensor:
    attention = CachedAttention(cache, range(len(tokens)), [1] * len(tokens))
    logits = model.logits(model(tokens, attention))
    attention.commit()
    return logits


@pytest.mark.parametrize(
    ("name", "compiled", "lengths"),
    [
        ("k3", False, LENGTHS),
        ("k3", True, LENGTHS[:1]),
        pytest.param("k3", True, LENGTHS, marks=pytest.mark.slow),
        ("kimi-linear", False, LENGTHS),
    ],
)
@torch.inference_mode()
def test_steps(oracle: Callable[[str], Oracle], name: str, compiled: bool, lengths: list[int]) -> None:
    model = oracle(name).model
    torch.compiler.reset()
    step = torch.compile(decode_step, backend="aot_eager", fullgraph=True) if compiled else decode_step
    (cache, tokens), (other, _) = begin(model, lengths), begin(model, lengths)
    for taken in range(STEPS):
        held = torch.tensor(lengths) + taken
        logits = step(model, other, tokens, held, reach_of(max(lengths) + taken + 1, other.capacity))
        torch.testing.assert_close(logits, ragged(model, cache, tokens), rtol=0, atol=5e-5)
        tokens = logits.argmax(-1)
    for pool, want in zip(other.pools(), cache.pools(), strict=True):
        torch.testing.assert_close(pool, want, rtol=0, atol=5e-5)


def test_reach() -> None:
    """At least a page and no more than there is, and few different ones."""
    assert [reach_of(n, 1000) for n in (1, PAGE, PAGE + 1, 512, 513, 1000)] == [PAGE, PAGE, 2 * PAGE, 512, 1000, 1000]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["k3-mxfp4", "kimi-linear"])
def test_generate(oracle: Callable[[str], Oracle], name: str) -> None:
    """The published greedy tokens, alone and padded, from a model that decodes compiled. Packed experts look at where
    the tokens go, so there the graph has gaps."""
    expected = oracle(name).expected
    network: Any = KimiK3ForGeneration.from_pretrained(oracle(name).folder)
    torch.compiler.reset()
    network.compile_decoding(backend="aot_eager")
    steps = counted(network)
    prompt = expected.prompts[0]
    new = network.generate(prompt[None], attention_mask=torch.ones_like(prompt)[None], **GREEDY)
    assert torch.equal(new[0, len(prompt) :], expected.greedy8[0])
    assert steps == [1] * 7

    longest = max(map(len, expected.prompts))
    ids, mask = (torch.zeros(len(expected.prompts), longest, dtype=torch.long) for _ in range(2))
    for row, prompt in enumerate(expected.prompts):
        ids[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1
    new = network.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(new[:, longest:], torch.stack(expected.greedy8))
    assert steps[7:] == [len(ids)] * 7


GREEDY = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}


def counted(network: Any) -> list[int]:
    """A list to which each compiled step adds its batch size."""
    sizes: list[int] = []
    step = network._decode_step

    def count(model: Any, cache: Any, tokens: Tensor, *rest: Any) -> Tensor:
        sizes.append(len(tokens))
        return step(model, cache, tokens, *rest)

    network._decode_step = count
    return sizes


def test_without_a_compiler(oracle: Callable[[str], Oracle], monkeypatch: pytest.MonkeyPatch) -> None:
    network = KimiK3ForGeneration.from_pretrained(oracle("k3").folder)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KimiK3Error, match="needs a C\\+\\+ compiler, and no-such-compiler was not found"):
        network.compile_decoding()
