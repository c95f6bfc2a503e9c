"""How many bytes each weight takes on a rank in each published format, from the shard records of the real modules.

The modules are built with plain weights. A format says of some of them how their elements are stored, and what comes
with each output row or each group of inputs; everything else keeps its parameter's size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from kimi_k3_npu.config import MXFP4_GROUP, TextConfig
from kimi_k3_npu.parallel.shard import Piece, layers
from kimi_k3_npu.plan.weights import Block, block_of
from kimi_k3_npu.recipes.schema import CheckpointFormat


@dataclass(frozen=True)
class Storage:
    """Bits of an element; bytes beside the elements for each output row, and for each group of inputs of one."""

    bits: int
    row_bytes: int = 0
    group_bytes: int = 0
    group: int = 1


@dataclass(frozen=True)
class Held:
    """Bytes of a weight's elements, and of the scales and corrections that belong to them."""

    elements: int
    scales: int = 0

    @property
    def total(self) -> int:
        return self.elements + self.scales

    def __add__(self, other: Held) -> Held:
        return Held(self.elements + other.elements, self.scales + other.scales)


#: Scale fp32 of each output row.
W8A8 = Storage(8, row_bytes=4)
#: Scale as 64 bits and correction fp32 of each output row, as the grouped matmul reads them.
W4A8 = Storage(4, row_bytes=12)
MXFP4 = Storage(4, group_bytes=1, group=MXFP4_GROUP)
#: Two int4 for each element under one bf16 scale.
INT4X2 = Storage(8, group_bytes=2, group=MXFP4_GROUP)

_EXPERTS = r"mlp\.experts\.w(13|2)"
_SHARED_AND_LATENT = r"mlp\.(shared_experts\..*|routed_expert_(down|up)_proj\.weight)"
_ATTENTION = r"self_attn\.(in_proj\.weight:(q_proj|k_proj|v_proj|q_a_proj|kv_a_proj_with_mqa)|q_b_proj\.weight)"

#: Pattern of "module.parameter" within a layer, with ":piece" where only some pieces are meant -> how it is stored.
FORMATS: dict[CheckpointFormat, Mapping[str, Storage]] = {
    "bf16": {},
    "mxfp4": {_EXPERTS: MXFP4},
    "int4x2": {_EXPERTS: INT4X2},
    "w4a8": {_EXPERTS: W4A8, _SHARED_AND_LATENT: W8A8},
    "w4a8-attn8": {_EXPERTS: W4A8, _SHARED_AND_LATENT: W8A8, _ATTENTION: W8A8, r"mlp\.dense\..*": W8A8},
}


def held_parameters(model: nn.Module, form: CheckpointFormat) -> dict[str, Held]:
    """The bytes of every parameter and buffer of `model` (built with plain experts) on its rank, by dotted path."""
    rules = [(re.compile(pattern), storage) for pattern, storage in FORMATS[form].items()]
    held = {path: Held(buffer.numel() * buffer.element_size()) for path, buffer in model.named_buffers()}
    for path, layer in layers(model):
        for name, parameter in layer.named_parameters(recurse=False):
            full = f"{path}.{name}"
            total = Held(parameter.numel() * parameter.element_size())
            inside = full.partition(".")[2].partition(".")[2] if full.startswith("layers.") else ""
            whole = _storage(rules, inside)
            for piece_name, piece in layer.pieces(name).items():
                if storage := whole or _storage(rules, f"{inside}:{piece_name}"):
                    total += _stored(piece, storage) + Held(-piece.numel * parameter.element_size())
                elif inside.startswith("mlp.experts."):
                    break  # thousands of pieces, all alike
            held[full] = total
    return held


def held_blocks(held: Mapping[str, Held], text: TextConfig) -> dict[Block, Held]:
    """The same by block."""
    blocks: dict[Block, Held] = {}
    for path, bytes_ in held.items():
        block = block_of(path, text)
        blocks[block] = blocks.get(block, Held(0)) + bytes_
    return blocks


def _storage(rules: list[tuple[re.Pattern[str], Storage]], inside: str) -> Storage | None:
    return next((storage for pattern, storage in rules if pattern.fullmatch(inside)), None)


def _stored(piece: Piece, storage: Storage) -> Held:
    rows, inputs = _kept(piece)
    groups = -(-inputs // storage.group) if storage.group_bytes else 0
    return Held(rows * inputs * storage.bits // 8, rows * (storage.row_bytes + groups * storage.group_bytes))


def _kept(piece: Piece) -> Iterator[int]:
    """Rows and columns of a published matrix that this rank keeps."""
    source = piece.source + (slice(None),) * (len(piece.shape) - len(piece.source))
    return (len(range(*part.indices(size))) for size, part in zip(piece.shape, source, strict=True))
