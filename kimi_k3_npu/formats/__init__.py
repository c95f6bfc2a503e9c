"""The formats in which weights are stored and kept: one module each, and the registry that everything else goes by.

To add one, write its module and put its instance into FORMATS.
"""

from __future__ import annotations

from kimi_k3_npu.formats.format import FLOAT, SEGMENTS, Format, Part, Stored, Tensors
from kimi_k3_npu.formats.int4x2 import Int4x2
from kimi_k3_npu.formats.mxfp4 import Mxfp4
from kimi_k3_npu.formats.plain import Plain
from kimi_k3_npu.formats.w4a8 import W4A8
from kimi_k3_npu.formats.w8a8 import MODELSLIM, W8A8

__all__ = [
    "FLOAT",
    "FORMATS",
    "MODELSLIM",
    "PLAIN",
    "SEGMENTS",
    "Format",
    "Part",
    "Stored",
    "Tensors",
    "convertible",
    "expert_formats",
    "keepers",
    "suffixes",
]

#: Every format by its name.
FORMATS: dict[str, Format] = {each.name: each for each in (Plain(), Mxfp4(), Int4x2(), W4A8(), W8A8())}

#: What weights are when nothing says otherwise.
PLAIN = FORMATS["plain"]


def keepers(stored: Format) -> list[Format]:
    """The formats that can keep experts stored as `stored` without expanding them, its own first."""
    found = [each for each in FORMATS.values() if stored.name in each.takes]
    return sorted(found, key=lambda each: each is not stored)


def expert_formats() -> dict[str, Format]:
    """The formats in which a rank can keep experts, by what users write."""
    return {each.option or each.name: each for each in FORMATS.values() if each.kept}


def convertible() -> dict[str, Format]:
    """The formats to which experts can be converted, by what users write."""
    return {each.option or each.name: each for each in FORMATS.values() if type(each).quantize is not Format.quantize}


def suffixes() -> tuple[str, ...]:
    """What can follow the name of a stored matrix, the longest first."""
    known = {part.suffix for each in FORMATS.values() for part in each.parts}
    return tuple(sorted(known, key=lambda suffix: (-len(suffix), suffix)))
