"""How far converted weights are from what they were, block by block."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class BlockError:
    """The weights of one block: sums over all their elements, in fp64.

    Args:
        weights: How many.
        before, after, product, difference: Sums of a * a, b * b, a * b and (a - b)^2, for a before and b after.
        worst: The largest relative error of one weight, and the name of it.
    """

    weights: int = 0
    before: float = 0.0
    after: float = 0.0
    product: float = 0.0
    difference: float = 0.0
    worst: tuple[float, str] = (0.0, "")

    @property
    def relative(self) -> float:
        """The norm of the difference, relative to that of what was."""
        return _ratio(self.difference, self.before)

    @property
    def cosine(self) -> float:
        """Of the angle between all values before and after."""
        lengths = math.sqrt(self.before * self.after)
        return self.product / lengths if lengths else 1.0

    def add(self, other: BlockError) -> None:
        self.weights += other.weights
        self.before += other.before
        self.after += other.after
        self.product += other.product
        self.difference += other.difference
        self.worst = max(self.worst, other.worst)


@dataclass
class ErrorReport:
    """The blocks whose weights were converted, in the order in which they came."""

    blocks: dict[str, BlockError] = field(default_factory=dict)

    def add(self, block: str, weight: str, before: Tensor, after: Tensor) -> None:
        """Count one weight, given by its values in fp32 before and after."""
        difference = _square(before - after)
        error = BlockError(
            1,
            _square(before),
            _square(after),
            _sum(before * after),
            difference,
            (_ratio(difference, _square(before)), weight),
        )
        self.blocks.setdefault(block, BlockError()).add(error)

    def merge(self, other: ErrorReport) -> None:
        for block, error in other.blocks.items():
            self.blocks.setdefault(block, BlockError()).add(error)

    @property
    def total(self) -> BlockError:
        total = BlockError()
        for error in self.blocks.values():
            total.add(error)
        return total

    def to_json(self) -> dict[str, Any]:
        """The sums, from which `from_json` makes the same report, with what follows from them."""
        return {
            name: {"relative_error": error.relative, "cosine": error.cosine, **asdict(error)}
            for name, error in self.blocks.items()
        }

    @classmethod
    def from_json(cls, blocks: Mapping[str, Mapping[str, Any]]) -> ErrorReport:
        names = BlockError.__dataclass_fields__
        report = cls()
        for block, values in blocks.items():
            kept = {name: values[name] for name in names}
            report.blocks[block] = BlockError(**{**kept, "worst": tuple(values["worst"])})
        return report


def _sum(values: Tensor) -> float:
    return float(values.sum(dtype=torch.float64))


def _square(values: Tensor) -> float:
    return _sum(values.square())


def _ratio(difference: float, before: float) -> float:
    if not before:
        return 0.0 if not difference else math.inf
    return math.sqrt(difference / before)
