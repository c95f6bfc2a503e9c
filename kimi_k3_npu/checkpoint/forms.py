"""The forms in which a checkpoint stores a weight matrix: the tensors it is made of, and how they make its values.

A plain weight is one tensor. The others are codes and what scales them; their shapes follow from the matrix's, so that
the part of a matrix that a rank holds says what to read of each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kimi_k3_npu.errors import LayoutError
from kimi_k3_npu.model.experts import ExpertForm, Int4PairExperts, PackedExperts, Stored, W4A8Experts
from kimi_k3_npu.ops.experts_int4 import int4_group_matrix, prepare_mxfp4_as_int4, w4a8_bias, w4a8_matrix
from kimi_k3_npu.ops.int4 import unpack_rows
from kimi_k3_npu.ops.quant import mxfp4_dequantize
from kimi_k3_npu.parallel.shard import Slices

FLOAT = (torch.bfloat16, torch.float16, torch.float32)

#: Tensors of one matrix, by what follows its name.
Tensors = Mapping[str, Tensor]

#: How far a scale_bias may be from the recomputed one: this much of 8 * scale for each input. Summing thousands of
#: fp32 numbers in another order moves it by 1e-6 of that, nibbles in the wrong order most rows by more than 1e-2.
SCALE_BIAS_TOLERANCE = 1e-3

#: ModelSlim splits the scale_bias of some matrices into so many sums over equal shares of the inputs.
SEGMENTS = 16


@dataclass(frozen=True)
class Part:
    """One tensor of a stored matrix.

    Args:
        suffix: What follows the matrix's name: ".weight_scale".
        dtypes: Those it may have.
        stored: Which part of the matrix one of its elements is for.
        segmented: It may instead have a column for each of SEGMENTS equal shares of the inputs.
    """

    suffix: str
    dtypes: tuple[torch.dtype, ...] = FLOAT
    stored: Stored = field(default_factory=Stored)
    segmented: bool = False

    def shapes(self, matrix: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The shapes that are right for a matrix of this shape; none when it cannot be stored like this."""
        if self._is_whole:
            return [matrix]
        if len(matrix) != 2 or matrix[0] % self.stored.rows or matrix[1] % (self.stored.columns or 1):
            return []
        shapes: list[tuple[int, ...]] = [self.stored.shape(*matrix)]
        if self.segmented and matrix[1] % SEGMENTS == 0:
            shapes.append((matrix[0], SEGMENTS))
        return shapes

    def source(self, name: str, share: Slices, matrix: tuple[int, ...], shape: tuple[int, ...]) -> Slices:
        """What to read of the tensor `name`, which has this `shape`, for the `share` of a matrix.

        Of segments, those of the share if they fill it exactly, else none.

        Raises:
            LayoutError: The share begins or ends within an element.
        """
        if self._is_whole:
            return share
        rows, columns = (*share, slice(None), slice(None))[:2]
        if self.segmented:
            columns = _segments(columns, matrix[1] // shape[1])
        else:
            columns = _divide(name, columns, self.stored.columns) if self.stored.columns else slice(None)
        source = (_divide(name, rows, self.stored.rows), columns)
        return source[::-1] if self.stored.transposed else source

    @property
    def _is_whole(self) -> bool:
        """Whether it simply holds the matrix."""
        return (self.stored.rows, self.stored.columns, self.stored.transposed) == (1, 1, False)


def _segments(columns: slice, width: int) -> slice:
    if columns == slice(None):
        return columns
    if columns.start % width or columns.stop % width:
        return slice(0, 0)
    return slice(columns.start // width, columns.stop // width)


def _divide(name: str, part: slice, by: int) -> slice:
    if part == slice(None):
        return part
    if part.start % by or part.stop % by:
        raise LayoutError(f"{name}: elements {part.start}..{part.stop - 1} of a rank are no whole groups of {by}")
    return slice(part.start // by, part.stop // by)


@dataclass(frozen=True, eq=False)
class Form:
    """One way of storing a matrix.

    Args:
        name: As it is called in messages and descriptions.
        parts: Its tensors, the codes first.
        values: From all tensors of a matrix, or of a share of it, to its values in a dtype.
        fault: What is wrong inside the tensors, beside NaN and infinity; None if nothing.
        kept: For each form that experts can be kept in without expanding them: what goes into which parameter, by what
            follows the parameter's name.
    """

    name: str
    parts: tuple[Part, ...]
    values: Callable[[Tensors, torch.dtype], Tensor]
    fault: Callable[[Tensors], str | None] = lambda tensors: None
    kept: Mapping[ExpertForm, Callable[[Tensors], Tensors]] = field(default_factory=dict)

    def part(self, suffix: str) -> Part | None:
        return next((part for part in self.parts if part.suffix == suffix), None)


def _mxfp4_values(tensors: Tensors, dtype: torch.dtype) -> Tensor:
    return mxfp4_dequantize(tensors[".weight_packed"], tensors[".weight_scale"], dtype)


def _mxfp4_fault(tensors: Tensors) -> str | None:
    count = int((tensors[".weight_scale"] == 255).sum())
    return f"weight_scale is 255, which stands for NaN, in {count} of its groups" if count else None


def _mxfp4_as_int4(tensors: Tensors) -> Tensors:
    packed, scale = tensors[".weight_packed"].unsqueeze(0), tensors[".weight_scale"].unsqueeze(0)
    (first, second), halved = prepare_mxfp4_as_int4(packed, scale, torch.bfloat16)
    return {"_first": first[0], "_second": second[0], "_scale": halved[0]}


def _int4x2_values(tensors: Tensors, dtype: torch.dtype) -> Tensor:
    halves = [tensors[".weight_first"], tensors[".weight_second"]]
    return int4_group_matrix(halves, tensors[".weight_scale"], dtype)


def _w8a8_values(tensors: Tensors, dtype: torch.dtype) -> Tensor:
    return (tensors[".weight"] * tensors[".weight_scale"].float()).to(dtype)


def _w4a8_values(tensors: Tensors, dtype: torch.dtype) -> Tensor:
    return w4a8_matrix(tensors[".weight"], tensors[".weight_scale"].float(), dtype)


def _w4a8_kept(tensors: Tensors) -> Tensors:
    codes, scale, bias = tensors[".weight"], tensors[".weight_scale"].float(), tensors[".scale_bias"].float()
    # A rank whose inputs are no whole segments has read none, and works its own sum out.
    own = bias.sum(1, keepdim=True) if bias.numel() else w4a8_bias(codes, scale)
    return {"": codes, "_scale": scale, "_bias": own}


def _modelslim_fault(tensors: Tensors) -> str | None:
    if count := int(tensors[".weight_offset"].count_nonzero()):
        return f"weight_offset is not 0 in {count} rows, but symmetric codes have no offset"
    if count := int((tensors[".weight_scale"] < 0).sum()):
        return f"weight_scale is negative in {count} rows"
    return None


def _w4a8_fault(tensors: Tensors) -> str | None:
    """scale_bias is 8 * sum(weight * scale) over each segment: a wrong nibble order or scale shows there."""
    if fault := _modelslim_fault(tensors):
        return fault
    found, scale = tensors[".scale_bias"].float(), tensors[".weight_scale"].float()
    if not found.numel():  # this rank's inputs are no whole segments
        return None
    codes = unpack_rows(tensors[".weight"]).unflatten(1, (found.shape[1], -1))
    unit = 8 * scale
    wanted = unit * codes.sum(-1, dtype=torch.int32)
    wrong = ~((found - wanted).abs() <= SCALE_BIAS_TOLERANCE * unit * codes.shape[-1])
    if not wrong.any():
        return None
    row, segment = wrong.nonzero()[0].tolist()
    return (
        f"scale_bias is not 8 * sum(weight * weight_scale) in {int(wrong.sum())} of {wrong.numel()} places (row {row}, "
        f"segment {segment}: {found[row, segment]:.5g} for {wanted[row, segment]:.5g}): they are not of one weight, "
        "or its 4-bit codes lie in another order than even row low, odd row high"
    )


def _parts(experts: type[PackedExperts] | type[Int4PairExperts], **names: tuple[torch.dtype, ...]) -> tuple[Part, ...]:
    """Tensors that are kept as they are stored."""
    return tuple(Part(f".weight{suffix}", dtypes, experts.stored[suffix]) for suffix, dtypes in names.items())


_ROW = Stored(columns=0)

PLAIN = Form("plain", (Part(".weight"),), lambda tensors, dtype: tensors[".weight"].to(dtype))

MXFP4 = Form(
    "MXFP4",
    _parts(PackedExperts, _packed=(torch.uint8,), _scale=(torch.uint8,)),
    _mxfp4_values,
    _mxfp4_fault,
    {
        "mxfp4": lambda tensors: {"_packed": tensors[".weight_packed"], "_scale": tensors[".weight_scale"]},
        "int4x2": _mxfp4_as_int4,
    },
)

INT4X2 = Form(
    "int4x2",
    _parts(Int4PairExperts, _first=(torch.int32,), _second=(torch.int32,), _scale=(torch.bfloat16,)),
    _int4x2_values,
    kept={"int4x2": lambda tensors: {name.removeprefix(".weight"): tensor for name, tensor in tensors.items()}},
)

#: ModelSlim's types. Activations are rounded to int8 by its name, which is up to what multiplies.
W8A8 = Form(
    "W8A8_DYNAMIC",
    (Part(".weight", (torch.int8,)), Part(".weight_scale", stored=_ROW), Part(".weight_offset", stored=_ROW)),
    _w8a8_values,
    _modelslim_fault,
)
W4A8 = Form(
    "W4A8_DYNAMIC",
    (
        Part(".weight", (torch.int8,), W4A8Experts.stored[""]),
        Part(".weight_scale", stored=_ROW),
        Part(".weight_offset", stored=_ROW),
        Part(".scale_bias", stored=_ROW, segmented=True),
    ),
    _w4a8_values,
    _w4a8_fault,
    {"w4a8": _w4a8_kept},
)

#: What can follow the name of a stored matrix, the longest first.
SUFFIXES = tuple(
    sorted(
        {part.suffix for form in (PLAIN, MXFP4, INT4X2, W8A8, W4A8) for part in form.parts},
        key=lambda suffix: (-len(suffix), suffix),
    )
)
