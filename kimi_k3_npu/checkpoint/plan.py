"""Match a checkpoint's tensors with a model's parameters, before anything is read.

Every tensor must be claimed once, every piece of every parameter filled once; what is not so is a fault, and all
faults are found together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kimi_k3_npu.checkpoint.names import FP32_NAMES, ROTATION, NameMap, Target, normalise, published_name
from kimi_k3_npu.checkpoint.reader import collector_paused
from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.errors import Fault
from kimi_k3_npu.formats import PLAIN
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
from kimi_k3_npu.parallel.shard import Piece, Slices, layers


class TensorInfo(Protocol):
    """What a plan needs to know of a published tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True)
class Assignment:
    """The published tensor `name` is a part of the weight that fills `record`; `source` of it is to be read."""

    name: str
    target: Target
    record: Piece
    source: Slices


@dataclass(frozen=True)
class LoadPlan:
    """What to read for this rank, and what is wrong.

    Args:
        assignments: What to read.
        elsewhere: Names of tensors that other ranks hold.
        skipped: Names of tensors that were left out on purpose.
        faults: What keeps the checkpoint from being loaded.
        notes: What is unusual but harmless, as faults of which none is one.
    """

    assignments: list[Assignment] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    notes: list[Fault] = field(default_factory=list)


@collector_paused()
def plan_loading(
    model: KimiK3ForCausalLM,
    tensors: Mapping[str, TensorInfo],
    names: NameMap,
    *,
    skip: Collection[str] = (),
) -> LoadPlan:
    """Assign each of `tensors` to the parameter piece it fills; names that start with one of `skip` are left out.

    Raises:
        LayoutError: A rank's share of a weight begins or ends within a stored element.
    """
    plan, records = LoadPlan(), records_of(model)
    claimed: dict[tuple[str, str, str], str] = {}
    for name, info in tensors.items():
        if name.removeprefix("language_model.").startswith(tuple(skip)):
            plan.skipped.append(name)
            continue
        target = names.target(name)
        if normalise(name) == ROTATION and model.is_first and model.mm_projector is None:
            plan.notes.append(Fault("left out", name, "turns the features of images, but there is no vision tower"))
            continue
        if isinstance(target, str):
            plan.faults.append(Fault("unknown tensor", name, target))
            continue
        if model.is_elsewhere(target.parameter):
            plan.elsewhere.append(name)
            continue
        record = records.get(target.first, {}).get(target.piece)
        if record is None:
            if why := _why_unused(target, target.first in records, model.config):
                plan.faults.append(Fault("unknown tensor", name, why))
            else:
                plan.elsewhere.append(name)
            continue
        first = claimed.setdefault((target.first, target.piece, target.part.suffix), name)
        if first is not name:
            plan.faults.append(Fault("tensor given twice", name, f"it and {first} are names of the same tensor"))
        else:
            _assign(plan, name, info, target, record, model.config.model_type)
    plan.faults.extend(_missing(records, claimed, names, model.config))
    return plan


def records_of(model: KimiK3ForCausalLM) -> dict[str, Mapping[str, Piece]]:
    """The pieces of every parameter, by its dotted path."""
    return {
        f"{path}.{name}": layer.pieces(name)
        for path, layer in layers(model)
        for name, _ in layer.named_parameters(recurse=False)
    }


def _assign(plan: LoadPlan, name: str, info: TensorInfo, target: Target, record: Piece, model_type: str) -> None:
    part, shape = target.part, tuple(info.shape)
    dtype = str(info.dtype).removeprefix("torch.")
    if info.dtype not in part.dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in part.dtypes)
        stored = "" if target.format is PLAIN else f" of a weight stored as {target.format.title}"
        plan.faults.append(Fault("wrong dtype", name, f"is {dtype}, expected {wanted}{stored}"))
        return
    if target.row.fix:  # its own judge of shapes, and it needs all of the tensor
        plan.assignments.append(Assignment(name, target, record, ()))
    elif shape not in part.shapes(record.shape):
        wanted = " or ".join(map(str, map(list, part.shapes(record.shape))))
        wanted = f"expected {wanted}" if wanted else f"a weight {list(record.shape)} cannot be {target.format.title}"
        plan.faults.append(Fault("wrong shape", name, f"is {list(shape)}, {wanted}"))
        return
    else:
        source = part.source(name, record.source, record.shape, shape)
        plan.assignments.append(Assignment(name, target, record, source))
    published = torch.float32 if name.endswith(FP32_NAMES) else part.published
    if published == torch.float32 != info.dtype:
        plan.notes.append(Fault("less precise than published", name, f"is {dtype}, published as float32"))
    if target.row.fix and len(shape) > 1 and model_type == "kimi_k3":
        plan.notes.append(Fault("former shape", name, f"is {list(shape)}, published as one dimension"))


def _why_unused(target: Target, has_parameter: bool, config: KimiK3Config) -> str | None:
    """None when the model has the piece, on another rank."""
    first, *rest = target.parameter.split(".")
    if first in ("vision_tower", "mm_projector"):
        return "config.json has no vision_config that would use it"
    if first != "layers":
        return "config.json leaves this part out"
    layer = int(rest[0])
    if layer >= config.text.num_hidden_layers:
        return f"layer {layer}, but config.json has num_hidden_layers = {config.text.num_hidden_layers}"
    kind = f"{config.text.layer_kinds[layer]} attention, {'experts' if config.text.is_moe(layer) else 'dense MLP'}"
    if not has_parameter:
        return f"layer {layer} of this config has none ({kind})"
    if not target.row.is_expert:
        return f"its layer has none ({kind})"
    expert = int(target.piece.partition(".")[0])
    return None if expert < config.text.num_experts else f"config.json has num_experts = {config.text.num_experts}"


def _missing(
    records: Mapping[str, Mapping[str, Piece]],
    claimed: Mapping[tuple[str, str, str], str],
    names: NameMap,
    config: KimiK3Config,
) -> Iterator[Fault]:
    for parameter, pieces in records.items():
        for piece in pieces:
            for target, published in names.sources(parameter, piece):
                if (parameter, piece, target.part.suffix) not in claimed:
                    full = published_name(published, config)
                    yield Fault("missing tensor", full, "the model needs it and no shard has it")
