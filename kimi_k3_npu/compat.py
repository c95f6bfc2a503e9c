"""What differs between the versions of torch that this package runs with. The only place that knows."""

from __future__ import annotations

import torch
from torch._guards import TracingContext


def is_compiling() -> bool:
    """Whether `torch.compile` is making a graph of what runs now.

    torch 2.10 says no of the operators in such a graph, which it runs on fake tensors to learn their shapes; that it is
    tracing it says only here.
    """
    return torch.compiler.is_compiling() or TracingContext.try_get() is not None
