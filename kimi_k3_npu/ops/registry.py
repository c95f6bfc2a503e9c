"""Operators whose kernel depends on the device, in the `torch.library` namespace `kimi_k3`.

An operator has one reference kernel, made of ordinary torch operations. It is registered as the composite kernel: every
device can run it, gradients flow through it and fake tensors pass through it. A device kernel is a plain function
that is registered beside it; PyTorch's dispatcher picks by the device of the tensors. No code here asks which device
there is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

LIBRARY = torch.library.Library("kimi_k3", "DEF")

#: NPU kernels by operator name. The tests walk it: each needs limits, a contract test and a numeric test.
NPU_KERNELS: dict[str, Callable] = {}

#: What lays weights out for an NPU's products after loading, by operator name.
NPU_LAYOUTS: dict[str, Callable] = {}


def define(schema: str) -> Callable[[Callable], Callable]:
    """Declare the operator `schema` ("name(Tensor x, ...) -> Tensor") with the decorated function as its reference.

    Returns the operator itself, so the decorated name dispatches: `rms_norm(x, w, eps)` runs the kernel of x's device.
    The reference stays reachable as `reference("name")`.
    """

    def bind(reference: Callable) -> Callable:
        name = schema.partition("(")[0]
        LIBRARY.define(schema)
        LIBRARY.impl(name, reference, "CompositeImplicitAutograd")
        _REFERENCES[name] = reference
        return getattr(torch.ops.kimi_k3, name).default

    return bind


def npu_kernel(name: str) -> Callable[[Callable], Callable]:
    """Register the decorated function as the NPU kernel of operator `name` and return it unchanged."""

    def bind(kernel: Callable) -> Callable:
        LIBRARY.impl(name, kernel, "PrivateUse1")
        NPU_KERNELS[name] = kernel
        return kernel

    return bind


def npu_layout(name: str) -> Callable[[Callable], Callable]:
    """Register the decorated function as what operator `name` does to loaded weights on an NPU; returns it unchanged.

    It computes nothing that could be inexact; what it launches on the way is among NPU_KERNELS itself.
    """

    def bind(layout: Callable) -> Callable:
        LIBRARY.impl(name, layout, "PrivateUse1")
        NPU_LAYOUTS[name] = layout
        return layout

    return bind


def reference(name: str) -> Callable:
    """The reference kernel of operator `name`. Raises KeyError if there is no such operator."""
    return _REFERENCES[name]


_REFERENCES: dict[str, Callable] = {}
