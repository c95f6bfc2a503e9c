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
    if x.shape[0] < MANY_ROWS or not _HAS_ONEDNN or not x.is_cpu or x.dtype != torch.float32 or torch.is_grad_enabled():
        return F.linear(x, weight)
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
