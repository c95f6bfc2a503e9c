"""Products of activations with a weight [o, i], as in torch: y = x @ W.T."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

#: Fewer rows than this are read off the weights by a vector product, which MKL does faster.
MANY_ROWS = 16

_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, i], weight [o, i] -> [T, o].

    PyTorch gives fp32 products on a CPU to MKL, which knows the vector units of one maker of processors only; on others
    oneDNN's are up to twice as fast. The operator that reaches them there (torch.compile uses it too) has no gradient.
    """
    if _for_onednn(x, weight):
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return F.linear(x, weight)


def linear_by_head(x: Tensor, weight: Tensor) -> Tensor:
    """x [h, T, i], weight [h, o, i], or [1, o, i] for all heads -> [h, T, o]."""
    if weight.shape[0] == 1:
        return linear(x.flatten(0, 1), weight[0]).unflatten(0, x.shape[:2])
    if x.shape[0] and _for_onednn(x[0], weight[0]):
        return torch.stack([linear(rows, its) for rows, its in zip(x, weight, strict=True)])
    return x @ weight.transpose(1, 2)


def _for_onednn(x: Tensor, weight: Tensor) -> bool:
    if x.shape[0] < MANY_ROWS or not _HAS_ONEDNN or not x.is_cpu or x.dtype != torch.float32:
        return False
    # With gaps between the rows of a weight, oneDNN takes a path that is a thousand times slower.
    return not torch.is_grad_enabled() and (weight.is_contiguous() or weight.t().is_contiguous())
