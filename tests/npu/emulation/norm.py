"""npu_rms_norm and npu_add_rms_norm."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.npu.emulation.core import Limits, emulates

FLOATS = (torch.float16, torch.bfloat16, torch.float32)

_rms = Limits("npu_rms_norm", "dtype")
_add = Limits("npu_add_rms_norm", "dtype")


@emulates(_rms)
def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(x * rstd * gamma, rstd fp32); the mean runs over gamma's dimensions."""
    _check(_rms, x, gamma)
    return _norm(x, gamma, epsilon)


@emulates(_add)
def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """(norm of the sum, rstd fp32, the sum), the sum rounded to its dtype before the norm."""
    _check(_add, x1, gamma)
    _add(x1.shape == x2.shape, f"x1 {list(x1.shape)} and x2 {list(x2.shape)} must have one shape")
    _add(x1.dtype == x2.dtype, f"x1 {x1.dtype} and x2 {x2.dtype} must have one dtype", "dtype")
    total = x1 + x2
    y, rstd = _norm(total, gamma, epsilon)
    return y, rstd, total


def _check(limits: Limits, x: Tensor, gamma: Tensor) -> None:
    limits(2 <= x.dim() <= 8, f"x is {x.dim()}-D, must be 2-D to 8-D")
    limits(x.dtype in FLOATS, f"x is {x.dtype}, must be one of {FLOATS}", "dtype")
    limits(gamma.dtype == x.dtype, f"gamma is {gamma.dtype}, must be x's {x.dtype}", "dtype")
    limits(x.shape[x.dim() - gamma.dim() :] == gamma.shape, f"gamma {list(gamma.shape)} must end x {list(x.shape)}")


def _norm(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    dims = tuple(range(-gamma.dim(), 0))
    wide = x.float()
    rstd = torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(x.dtype), rstd
