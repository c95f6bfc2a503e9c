"""How many bytes each weight takes on a rank in each published format.

Routed experts are counted on the modules that hold the format. Linear layers that a W4A8 checkpoint stores in int8
(W8A8) are counted as an engine's own model keeps them, from the shard records; this package's model keeps them in the
dtype of the other weights, as its modules show.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from kimi_k3_npu.config import TextConfig
from kimi_k3_npu.formats import FORMATS
from kimi_k3_npu.parallel.shard import Piece, layers
from kimi_k3_npu.plan.weights import Block, block_of
from kimi_k3_npu.recipes.schema import CheckpointFormat


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


#: The form in which a format's routed experts are kept.
EXPERT_FORMS: dict[CheckpointFormat, str] = {
    "bf16": "plain",
    "mxfp4": "mxfp4",
    "int4x2": "int4x2",
    "w4a8": "w4a8",
    "w4a8-attn8": "w4a8",
}


def expert_group(form: CheckpointFormat) -> int:
    """Inputs of a routed expert that share a scale, and so stay together."""
    return FORMATS[EXPERT_FORMS[form]].group


_SHARED_AND_LATENT = r"mlp\.(shared_experts\..*|routed_expert_(down|up)_proj\.weight)"
_ATTENTION = r"self_attn\.(in_proj\.weight:(q_proj|k_proj|v_proj|q_a_proj|kv_a_proj_with_mqa)|q_b_proj\.weight)"
#: Linear layers that a format stores in int8: "module.parameter" within a layer, ":piece" where only some pieces are.
INT8_LINEARS: dict[CheckpointFormat, Sequence[str]] = {
    "w4a8": (_SHARED_AND_LATENT,),
    "w4a8-attn8": (_SHARED_AND_LATENT, _ATTENTION, r"mlp\.dense\..*"),
}
#: Of an int8 matrix: the fp32 scale of each output row.
SCALE_BYTES = 4

_IS_SCALE = re.compile(r"mlp\.experts\.w(13|2)_(scale|bias)")


def held_parameters(model: nn.Module, form: CheckpointFormat, *, own_model: bool) -> dict[str, Held]:
    """The bytes of every parameter and buffer of `model` on its rank, by dotted path.

    Args:
        model: Built with the EXPERT_FORMS of `form`.
        own_model: Whether it is this package's model that runs, and not the engine's.
    """
    rules = [] if own_model else [re.compile(pattern) for pattern in INT8_LINEARS.get(form, ())]
    held = {path: Held(buffer.numel() * buffer.element_size()) for path, buffer in model.named_buffers()}
    for path, layer in layers(model):
        for name, parameter in layer.named_parameters(recurse=False):
            full, size = f"{path}.{name}", parameter.element_size()
            inside = full.split(".", 2)[2] if full.startswith("layers.") else ""
            if _IS_SCALE.fullmatch(inside):
                held[full] = Held(0, parameter.numel() * size)
                continue
            total = Held(parameter.numel() * size)
            if not inside.startswith("mlp.experts."):
                for piece in _in_int8(rules, inside, layer.pieces(name)):
                    rows, inputs = _kept(piece)
                    total += Held(rows * inputs * (1 - size), rows * SCALE_BYTES)
            held[full] = total
    return held


def held_blocks(held: Mapping[str, Held], text: TextConfig) -> dict[Block, Held]:
    """The same by block."""
    blocks: dict[Block, Held] = {}
    for path, bytes_ in held.items():
        block = block_of(path, text)
        blocks[block] = blocks.get(block, Held(0)) + bytes_
    return blocks


def _in_int8(rules: list[re.Pattern[str]], inside: str, pieces: Mapping[str, Piece]) -> Iterator[Piece]:
    for name, piece in pieces.items():
        if any(rule.fullmatch(inside) or rule.fullmatch(f"{inside}:{name}") for rule in rules):
            yield piece


def _kept(piece: Piece) -> Iterator[int]:
    """Rows and columns of a published matrix that this rank keeps."""
    source = piece.source + (slice(None),) * (len(piece.shape) - len(piece.source))
    return (len(range(*part.indices(size))) for size, part in zip(piece.shape, source, strict=True))
