"""What a weight format is: everything about one way of storing a matrix [O, I], from files to the product.

A plain weight is one tensor. In other formats a matrix is codes and what scales them; their shapes follow from the
matrix's, so that the part of a matrix that a rank holds says what to read of each tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from kimi_k3_npu.errors import LayoutError
from kimi_k3_npu.ops.experts import ExpertsOp
from kimi_k3_npu.parallel.shard import Slices

FLOAT = (torch.bfloat16, torch.float16, torch.float32)

#: Tensors of one matrix, by what follows its name (in files) or its parameter's name (in memory).
Tensors = Mapping[str, Tensor]

#: ModelSlim splits the scale_bias of some matrices into so many sums over equal shares of the inputs.
SEGMENTS = 16


@dataclass(frozen=True)
class Stored:
    """One of the tensors that hold a matrix. One of its elements is for `rows` rows and `columns` columns of the matrix
    (columns 0: for all of them). `dtype` None is the model's; `transposed` says that its rows are the matrix's columns.
    """

    dtype: torch.dtype | None = None
    rows: int = 1
    columns: int = 1
    transposed: bool = False

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Of the tensor for a matrix [rows, columns]."""
        shape = (rows // self.rows, columns // self.columns if self.columns else 1)
        return shape[::-1] if self.transposed else shape


@dataclass(frozen=True)
class Part:
    """One tensor of a matrix in a file.

    Args:
        suffix: What follows the matrix's name: ".weight_scale".
        dtypes: Those it may have.
        stored: Which part of the matrix one of its elements is for.
        segmented: It may instead have a column for each of SEGMENTS equal shares of the inputs.
        published: The dtype in which it is published; another of `dtypes` is less precise.
    """

    suffix: str
    dtypes: tuple[torch.dtype, ...] = FLOAT
    stored: Stored = field(default_factory=Stored)
    segmented: bool = False
    published: torch.dtype | None = None

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


class Format(ABC):
    """One way of storing a matrix. A format is used by its one instance, which `formats.FORMATS` has by `name`."""

    #: By which code and users know it, and as messages call it.
    name: ClassVar[str]
    title: ClassVar[str]
    #: What users write to have experts kept or converted so, where that is not the name.
    option: ClassVar[str] = ""
    #: The kind of folder that holds it: its own name, or that of a tool whose folders mix several formats.
    folder: ClassVar[str]
    #: Its tensors in files, the codes first.
    parts: ClassVar[tuple[Part, ...]]
    #: What follows a matrix's name in files of this format and no other; "" when nothing tells.
    sign: ClassVar[str] = ""
    #: Inputs that share a scale: a matrix is split between such groups only.
    group: ClassVar[int] = 1
    #: Dtypes that cannot hold its values.
    too_narrow: ClassVar[tuple[torch.dtype, ...]] = ()
    #: What a rank keeps of an expert's matrix, by what follows the parameter's name; empty if experts are expanded.
    kept: ClassVar[Mapping[str, Stored]] = {}
    #: The operator of experts that multiplies by what is kept.
    product: ClassVar[ExpertsOp]
    #: Formats in files whose matrices it can keep, exactly, with how their tensors become what it keeps.
    takes: ClassVar[Mapping[str, Callable[[Tensors], Tensors]]] = {}

    @abstractmethod
    def values(self, tensors: Tensors, dtype: torch.dtype) -> Tensor:
        """The values of a matrix, or of a share of it, from all of its tensors in files."""

    def fault(self, tensors: Tensors) -> str | None:
        """What is wrong inside the tensors of a matrix, or of a share of it."""
        return None

    def quantize(self, name: str, weight: Tensor) -> Tensors:
        """The float `weight` [O, I] called `name` in the tensors of this format, for a file.

        Raises:
            ValueError: `weight` holds NaN or infinity, or this format is not written.
        """
        raise ValueError(f"{self.title} is read, not written")

    def written(self, name: str, matrix: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]] | None:
        """Shape and dtype of each tensor that `quantize` makes of a weight of that name and shape; None if it can't."""
        if not all(part.shapes(matrix) for part in self.parts):
            return None
        return {
            part.suffix: (part.shapes(matrix)[0], part.published or part.stored.dtype or torch.bfloat16)
            for part in self.parts
        }

    def quantization_config(self) -> dict[str, Any] | None:
        """What announces this format in the config.json of a folder; None where nothing there does."""
        return None

    def lay_out(self, kept: Tensors, dtype: torch.dtype) -> Tensors:
        """What is kept of experts' matrices [E, ...], or a part of it, as this device multiplies rows of `dtype` by
        it."""
        return {}

    @property
    def is_kept_as_stored(self) -> bool:
        """Whether a rank keeps experts in the very tensors of a file."""
        return {part.suffix.removeprefix(".weight") for part in self.parts} == set(self.kept)

    def part(self, suffix: str) -> Part | None:
        return next((part for part in self.parts if part.suffix == suffix), None)


def as_stored(tensors: Tensors) -> Tensors:
    """Keep a matrix's tensors as they are in files."""
    return {suffix.removeprefix(".weight"): tensor for suffix, tensor in tensors.items()}
