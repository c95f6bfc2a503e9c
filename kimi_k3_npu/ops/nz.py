"""How a weight lies in the memory of an NPU: plainly (ND), or in the tiles that the matrix unit reads (NZ).

The format changes neither shape nor values, and views keep it; any copy of an NZ tensor is ND again.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_k3_npu.ops.device import Device, current
from kimi_k3_npu.ops.limits import nothing_to_run
from kimi_k3_npu.ops.op import operator

NZ = 29
#: A tile is 16 rows of 32 bytes.
TILE_ROWS, TILE_BYTES = 16, 32


@operator("as_nz(Tensor weight, bool fp4) -> Tensor")
def as_nz(weight: Tensor, fp4: bool) -> Tensor:
    """A copy of `weight` [..., rows, columns] in NZ where there is such a thing; elsewhere, or if no tiles fit, ND.

    fp4: each byte (uint8) holds two 4-bit floats, which are tiled as such.
    """
    return weight.clone()


@operator("mxfp4_layout(Tensor packed) -> Tensor")
def mxfp4_layout(packed: Tensor) -> Tensor:
    """Packed MXFP4 matrices, u8 [E, N, K/2], as this device's products take them: here `packed` itself."""
    return packed


@mxfp4_layout.layout
def mxfp4_layout_npu(packed: Tensor) -> Tensor:
    """In NZ on an A5; other NPUs have no product for them. What is in NZ already stays what it is."""
    return packed if current().soc != "a5" or is_nz(packed) else as_nz(packed, True)


@operator("overwrite(Tensor(a!) kept, Tensor values) -> bool")
def overwrite(kept: Tensor, values: Tensor) -> bool:
    """Write `values` over `kept`, where captured graphs read them; False, and nothing done, where that cannot be."""
    if (kept.shape, kept.dtype) != (values.shape, values.dtype):
        return False
    kept.copy_(values)
    return True


@overwrite.layout
def overwrite_npu(kept: Tensor, values: Tensor) -> bool:
    """What lies in NZ is copied as the bytes that were cast, of whatever dtype a view of them is: other dtypes have
    other tiles. On an A5 torch_npu copies nothing into NZ."""
    nz = is_nz(kept)
    if nz != is_nz(values) or (nz and current().soc == "a5"):
        return False
    pair = (kept.view(torch.int8), values.view(torch.int8)) if nz else (kept, values)
    return overwrite.reference(*pair)


@dataclass(frozen=True)
class Cast:
    """One cast on one device; `row_bytes` is the length of a row."""

    rows: int
    row_bytes: int
    fp4: bool
    device: Device


@as_nz.case(Cast)
def _case(weight: Tensor, fp4: bool) -> tuple:
    return weight.shape[-2], weight.shape[-1] * weight.element_size(), fp4


def is_nz(weight: Tensor) -> bool:
    """Whether an NPU tensor lies in NZ. One without memory (meta) is taken to lie as its device wants it."""
    return weight.is_meta or importlib.import_module("torch_npu").get_npu_format(weight) == NZ


def refuse_nz(case: Cast) -> str | None:
    """Whole tiles only; and 4-bit floats exist on the A5 alone."""
    if reason := nothing_to_run(case.device, case.rows):
        return reason
    if case.fp4 and case.device.soc != "a5":
        return f"{case.device.soc} has no 4-bit floats, only a5 has"
    if case.rows % TILE_ROWS or case.row_bytes % TILE_BYTES:
        return f"{case.rows} rows of {case.row_bytes} bytes are not whole tiles of {TILE_ROWS} rows of {TILE_BYTES}"
    return None


@as_nz.kernel("npu_format_cast", refuse_nz)
def nz(weight: Tensor, fp4: bool) -> Tensor:
    torch_npu = importlib.import_module("torch_npu")
    torch_npu.npu.config.allow_internal_format = True  # without it the cast does nothing, and says nothing
    dtypes = {"customize_dtype": torch.float8_e4m3fn, "input_dtype": torch_npu.float4_e2m1fn_x2} if fp4 else {}
    return torch.ops.npu.npu_format_cast(weight, NZ, **dtypes)


@as_nz.kernel("plain")
def plain(weight: Tensor, fp4: bool) -> Tensor:
    """A copy as it is."""
    return as_nz.reference(weight, fp4)
