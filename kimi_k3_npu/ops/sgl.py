"""Finding the kernels of sgl_kernel_npu at the moment they are launched."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from kimi_k3_npu.errors import LaunchError
from kimi_k3_npu.ops.limits import SGL_KERNEL_NPU


def function(module: str, name: str) -> Callable[..., Any]:
    """sgl_kernel_npu.`module`.`name`. Raises LaunchError if the installed version has none."""
    try:
        return getattr(importlib.import_module(f"{SGL_KERNEL_NPU}.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise _too_old(f"{module}.{name}", error) from error


def operator(name: str) -> Callable[..., Any]:
    """torch.ops.npu.`name`, which importing the package registers. Raises LaunchError if the version has none."""
    try:
        importlib.import_module(SGL_KERNEL_NPU)
        return getattr(torch.ops.npu, name)
    except (ImportError, AttributeError) as error:
        raise _too_old(f"operator {name}", error) from error


def _too_old(what: str, error: Exception) -> LaunchError:
    return LaunchError(
        f"the installed {SGL_KERNEL_NPU} has no usable {what} ({error}); install a version made for Kimi-K3, or remove "
        "it: without it, basic operators do the same"
    )
