"""The chunked delta rule solves a triangular system a chunk: the inverse by blocks, and systems that are hard."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kimi_k3_npu.ops.kda import kda_recurrent, l2_norm
from kimi_k3_npu.ops.kda_chunk import kda_chunk, unit_lower_inverse

SYSTEMS = {
    "none": lambda C: torch.zeros(2, C, C),
    "mild": lambda C: torch.rand(2, C, C) / C,
    "equal keys": lambda C: torch.ones(2, C, C),  # whose powers grow to 1e17 at C = 64
    "alternating keys": lambda C: (-1.0) ** torch.arange(C) * torch.ones(2, C, C),
    "random": lambda C: (lambda x: x @ x.mT)(l2_norm(torch.randn(2, C, 8))),
}


@pytest.mark.parametrize("C", [1, 2, 16, 64])
@pytest.mark.parametrize("system", SYSTEMS)
def test_inverse(system: str, C: int) -> None:
    """What is above the diagonal, and on it, is not read."""
    lower = SYSTEMS[system](C) + torch.full((C, C), torch.nan).triu(0).nan_to_num(1e6)
    right = torch.randn(2, C, 5)
    want = torch.linalg.solve_triangular(lower.double(), right.double(), upper=False, unitriangular=True)
    got = unit_lower_inverse(lower) @ right
    assert (got - want).abs().max() <= 1e-5 * max(1.0, want.abs().max().item())


DECAYS = {"none": 0.0, "weak": -0.02, "K3's strongest": -5.0, "Kimi-Linear's": -60.0}


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("seq_lens", [[], [0], [1], [64, 3], [130, 0, 65]], ids=str)
def test_chunks_are_the_recurrence(seq_lens: list[int], decay: str) -> None:
    T, h, K, V = sum(seq_lens), 3, 16, 24
    q, k = l2_norm(torch.randn(T, h, K)) * K**-0.5, l2_norm(torch.randn(T, h, K))
    k[: T // 2] = k[:1]  # the same key again and again: the hardest systems
    g = DECAYS[decay] * torch.rand(T, h, K)
    inputs = q, k, torch.randn(T, h, V), g, torch.rand(T, h), torch.randn(len(seq_lens), h, K, V), seq_lens
    for got, want in zip(kda_chunk(*inputs), kda_recurrent(*inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_values_may_have_the_dtype_of_the_model() -> None:
    T, h, K, V = 70, 2, 16, 24
    q, k, v = (l2_norm(torch.randn(T, h, width)) for width in (K, K, V))
    rest: tuple[Tensor, ...] = (-torch.rand(T, h, K), torch.rand(T, h), torch.randn(1, h, K, V))
    for got, want in zip(
        kda_chunk(q, k, v.bfloat16(), *rest, [T]), kda_chunk(q, k, v.bfloat16().float(), *rest, [T]), strict=True
    ):
        assert torch.equal(got, want)
