"""How quantised weights are laid out: int4 in int32, MX numbers, and npu_format_cast with the traps of NZ."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.npu.emulation.core import FLOAT4_E2M1, FORGET, Limits, dtype_of, emulates

ND, NZ = 2, 29

_cast = Limits("npu_format_cast")
_pack = Limits("npu_convert_weight_to_int4pack")

# Storage of a tensor in NZ -> (the dtype whose tiles it has, whether it was cast as fp4).
_NZ: dict[StorageWeakRef, tuple[torch.dtype, bool]] = {}
FORGET.append(_NZ.clear)

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@emulates(_cast)
def npu_format_cast(
    input: Tensor, acl_format: int, *, customize_dtype: int | None = None, input_dtype: int | None = None
) -> Tensor:
    """A copy in the format ND (2) or NZ (29). Numbers stay where they are here; the tiling is only noted down."""
    _cast(acl_format in (ND, NZ), f"acl_format={acl_format}, must be 2 (ND) or 29 (NZ)")
    fp4 = input_dtype == FLOAT4_E2M1
    if fp4:
        _cast.soc("a5")
        _cast(input.dtype == torch.uint8, f"fp4 comes in uint8, not in {input.dtype}")
        _cast(dtype_of(customize_dtype) == torch.float8_e4m3fn, "customize_dtype must be float8_e4m3fn for fp4")
    else:
        _cast.no(customize_dtype=customize_dtype, input_dtype=input_dtype)
    output = input.clone()
    if acl_format == NZ:
        _NZ[StorageWeakRef(output.untyped_storage())] = (input.dtype, fp4)
    return output


def nz_tiles(weight: Tensor) -> tuple[torch.dtype, bool] | None:
    """The dtype for which `weight` was tiled and whether as fp4; None if it is ND. A copy of an NZ tensor is ND."""
    return _NZ.get(StorageWeakRef(weight.untyped_storage()))


#: Where the packing puts each eighth of an int32, and the weight-only products look for it. The page does not say, so a
#: test may exchange it.
nibble_order = list(range(8))


@emulates(_pack)
def npu_convert_weight_to_int4pack(weight: Tensor, inner_k_tiles: int = 0) -> Tensor:
    """int32 [k, n] of values in -8..7 -> int32 [k, n/8], element j of eight at nibble nibble_order[j]."""
    _pack(weight.dtype == torch.int32 and weight.dim() == 2, f"{weight.dim()}-D {weight.dtype}, must be 2-D int32")
    _pack(weight.is_contiguous(), "weight must be contiguous")
    _pack(weight.shape[1] % 8 == 0, f"last dimension {weight.shape[1]}, must be a multiple of 8")
    _pack(bool(((weight >= -8) & (weight <= 7)).all()), "values must be in -8..7")
    nibbles = weight.to(torch.int64).unflatten(1, (-1, 8)) & 0xF
    return (nibbles << (4 * torch.tensor(nibble_order))).sum(-1).to(torch.int32)


def unpack_int4(packed: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """int32 [..., n/8] -> int8 [..., n] of values in -8..7, element j of eight from nibble order[j]."""
    nibbles = (packed.to(torch.int64).unsqueeze(-1) >> (4 * torch.tensor(order))) & 0xF
    return torch.where(nibbles > 7, nibbles - 16, nibbles).to(torch.int8).flatten(-2)


def decode_e2m1(packed: Tensor) -> Tensor:
    """uint8 [..., n/2] -> fp32 [..., n], the lower index in the low nibble."""
    nibbles = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2).long()
    return _E2M1[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0)


def decode_e8m0(exponents: Tensor) -> Tensor:
    """uint8 -> fp32 powers of two with bias 127; 255 is NaN."""
    return torch.where(exponents == 255, torch.nan, torch.exp2(exponents.float() - 127))
