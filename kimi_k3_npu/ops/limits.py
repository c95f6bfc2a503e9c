"""Reasons that several kernels share. A reason is what a kernel says when it refuses a case; None means it takes it."""

from __future__ import annotations

import torch

from kimi_k3_npu.ops import schemas, sgl
from kimi_k3_npu.ops.device import Device

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
HALVES = (torch.float16, torch.bfloat16)
#: Sizes that operators count in 16 bits, and offsets that kernels count in 32, stay below these.
INNER_LIMIT = 1 << 16
OFFSET_LIMIT = 1 << 31

SGL_KERNEL_NPU = sgl.PACKAGE


def nothing_to_run(device: Device, rows: int) -> str | None:
    """Without an NPU there is no kernel; without rows there is no launch, as on an idle data-parallel rank."""
    if device.soc == "cpu":
        return "there is no NPU"
    return None if rows else "there are no rows"


def no_kernel(device: Device, symbol: str) -> str | None:
    """Kernels of sgl_kernel_npu are used where it can be imported and has them, and are never required."""
    if SGL_KERNEL_NPU not in device.packages:
        return f"the package {SGL_KERNEL_NPU} cannot be imported"
    return f"the installed {SGL_KERNEL_NPU} has no usable {symbol}" if symbol in device.missing else None


def no_operator(device: Device, needs: schemas.Needs) -> str | None:
    """A kernel calls operators of torch_npu only where the installed version has them and the arguments it passes."""
    lacking = sorted(needs & device.missing)
    return f"the installed {schemas.PACKAGE} has no {', '.join(lacking)}" if lacking else None


def wrong_dtype(name: str, dtype: torch.dtype, allowed: tuple[torch.dtype, ...]) -> str | None:
    if dtype in allowed:
        return None
    return f"{name} is {dtype}, must be {' or '.join(str(option).removeprefix('torch.') for option in allowed)}"
