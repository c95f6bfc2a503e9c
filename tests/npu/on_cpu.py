"""The package's NPU kernels in the place of its CPU ones."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kimi_k3_npu import ops
from kimi_k3_npu.ops.op import OPS

for module in pkgutil.iter_modules(ops.__path__):
    importlib.import_module(f"{ops.__name__}.{module.name}")


@contextmanager
def on_cpu() -> Iterator[None]:
    """Inside the block every operator that has an NPU kernel runs it on CPU tensors."""
    library = torch.library.Library("kimi_k3", "IMPL")
    for name, op in OPS.items():
        if kernel := op.npu_layout or (op.kernels and op.npu):
            library.impl(name, kernel, "CPU")
    try:
        yield
    finally:
        library._destroy()
