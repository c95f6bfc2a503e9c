"""`linear` by whichever library it takes, held against a product in double precision."""

from __future__ import annotations

import pytest
import torch

from kimi_k3_npu.ops.linear import MANY_ROWS, linear, linear_by_head


@pytest.mark.parametrize("rows", [0, 1, MANY_ROWS - 1, MANY_ROWS, MANY_ROWS + 1, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product(rows: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, 48).to(dtype), torch.randn(20, 48).to(dtype)
    want = (x.double() @ weight.double().t()).to(dtype)
    with torch.inference_mode():
        got = linear(x, weight)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.125)


@torch.inference_mode()
def test_rows_and_weights_may_be_views() -> None:
    x, weight = torch.randn(64, 100)[:, 10:58], torch.randn(3, 48, 20).transpose(1, 2)[1]
    torch.testing.assert_close(linear(x, weight), x.contiguous() @ weight.t())
    torch.testing.assert_close(linear(x.t().contiguous().t(), weight), x.contiguous() @ weight.t())


@torch.inference_mode()
def test_weights_with_gaps_are_left_to_pytorch() -> None:
    """oneDNN took 0.13 s for this product of 70 microseconds."""
    x, weight = torch.randn(128, 96), torch.randn(512, 4, 96)[:, 0]
    with torch.profiler.profile() as profile:
        torch.testing.assert_close(linear(x, weight), x @ weight.t())
    assert not any("mkldnn" in event.name for event in profile.events())


@pytest.mark.parametrize("heads", [0, 1, 3])
@pytest.mark.parametrize("rows", [1, MANY_ROWS])
@torch.inference_mode()
def test_by_head(rows: int, heads: int) -> None:
    x, weight = torch.randn(heads, rows, 8), torch.randn(heads, 5, 8)
    torch.testing.assert_close(linear_by_head(x, weight), torch.einsum("hti,hoi->hto", x, weight))
    shared = torch.randn(1, 5, 8)
    torch.testing.assert_close(linear_by_head(x, shared), torch.einsum("hti,oi->hto", x, shared[0]))


@pytest.mark.parametrize("rows", [1, 2 * MANY_ROWS])
def test_gradients(rows: int) -> None:
    x, weight = torch.randn(rows, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    linear(x, weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    torch.testing.assert_close(x.grad, weight.detach().sum(0).expand_as(x))
    torch.testing.assert_close(weight.grad, x.detach().sum(0).expand_as(weight))
