"""Whole sequences without a cache: the same logits as with one, and gradients to every parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
from kimi_k3_npu.model.uncached import UncachedAttention


def logits(model: KimiK3ForCausalLM, prompts: list[Tensor]) -> list[Tensor]:
    lengths = [len(prompt) for prompt in prompts]
    return list(model.logits(model(torch.cat(prompts), UncachedAttention(lengths))).split(lengths))


@pytest.mark.parametrize("name", ["k3", "k3-deep", "kimi-linear"])
def test_as_with_a_cache(oracle: Callable, name: str) -> None:
    found = oracle(name)
    expected = [rows[:n] for rows in found.expected.logits for n in (len(rows), len(rows) - 7)]
    prompts = [prompt[:n] for prompt in found.expected.prompts for n in (len(prompt), len(prompt) - 7)]
    for actual, wanted in zip(logits(found.model, prompts), expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=5e-4, rtol=0)


def test_every_parameter_gets_a_gradient(oracle: Callable) -> None:
    model = copy.deepcopy(oracle("k3").model).requires_grad_(True)
    prompts = [torch.randint(model.config.text.vocab_size, (n,)) for n in (90, 40)]
    # what picks experts, what is no part of the text, and a mixer that has nothing to mix have none
    trained = {
        name: parameter
        for name, parameter in model.named_parameters()
        if not name.startswith(("vision", "mm_", "layers.0.self_attention_res")) and not name.endswith("gate.bias")
    }
    losses = [
        F.cross_entropy(row[:-1], prompt[1:]) for row, prompt in zip(logits(model, prompts), prompts, strict=True)
    ]
    gradients = torch.autograd.grad(sum(losses, torch.zeros(())), list(trained.values()))
    for name, gradient in zip(trained, gradients, strict=True):
        assert gradient.isfinite().all(), name
        assert gradient.any(), name
