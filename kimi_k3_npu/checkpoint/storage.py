"""How a folder stores its weights, and whether config.json, the description and the tensors agree about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kimi_k3_npu.checkpoint.forms import FLOAT, INT4X2, MXFP4, PLAIN, Form
from kimi_k3_npu.checkpoint.modelslim import DESCRIPTION, read_description
from kimi_k3_npu.checkpoint.names import NameMap, normalise, weight_of
from kimi_k3_npu.checkpoint.reader import Checkpoint
from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.errors import CheckpointError, Fault
from kimi_k3_npu.model.experts import ExpertForm

StorageName = Literal["plain", "mxfp4", "int4x2", "modelslim"]

#: How experts can be kept in memory: as they are stored, but for "bf16", which expands them once, and "int4x2", which
#: also holds MXFP4 exactly. "packed" is "auto" and insists that they are not plain.
ExpertWeights = Literal["auto", "packed", "bf16", "int4x2"]

_PACKED = {"mxfp4": MXFP4, "int4x2": INT4X2}


@dataclass(frozen=True)
class Storage:
    """How the weights of one folder are stored.

    Args:
        name: Of the kind of folder.
        experts: The form of the routed experts; plain when they are not all of one form.
        forms: The form of weights by their normalised names, as far as a description says. Other weights are plain.
        faults: Where the description and the tensors disagree.
        notes: What is unusual about the description but harmless.
        folder: Which, for messages.
    """

    name: StorageName
    experts: Form = PLAIN
    forms: dict[str, Form] | None = None
    faults: tuple[Fault, ...] = field(default=())
    notes: tuple[Fault, ...] = field(default=())
    folder: Path = Path()

    def form_of(self, weight: str) -> Form:
        """The form that `weight`, a normalised name, is stored in."""
        if self.forms is not None:
            return self.forms.get(weight, PLAIN)
        return self.experts if ".mlp.experts." in weight else PLAIN

    def faults_beside(self, others: Iterable[Fault]) -> list[Fault]:
        """The faults, without those of tensors that one of `others` names too."""
        known = {fault.name for fault in others}
        return [fault for fault in self.faults if fault.name not in known]

    def names(self, experts: ExpertForm = "plain") -> NameMap:
        """The name map for a model that keeps its experts as `experts`."""
        return NameMap(self.form_of, experts)

    def expert_form(self, wanted: ExpertWeights = "auto") -> ExpertForm:
        """The form in which a model is to keep the experts.

        Raises:
            CheckpointError: What is stored here cannot be kept as `wanted`.
        """
        kept = tuple(self.experts.kept)
        if wanted == "bf16" or (wanted == "auto" and not kept):
            return "plain"
        if wanted in ("auto", "packed") and kept:
            return kept[0]
        for form in kept:
            if form == wanted:
                return form
        what = "its experts are not packed" if not kept else f"its experts are {self.experts.name}"
        choices = ("auto", *(("packed",) if kept else ()), "bf16", *(form for form in kept if form == "int4x2"))
        raise CheckpointError(f"{self.folder}: {what}; use expert_weights {' or '.join(map(repr, choices))}")


def read_storage(
    checkpoint: Checkpoint, config: KimiK3Config, expected: StorageName | Literal["auto"] = "auto"
) -> Storage:
    """How the weights in the folder of `checkpoint` are stored.

    Args:
        expected: What the caller was told, such as an engine's quantisation flag; "auto" takes what there is.

    Raises:
        CheckpointError: config.json, the description and the tensors do not tell the same, or not what was expected.
    """
    storage = _found(checkpoint, config)
    if expected not in ("auto", storage.name):
        detail = f"asked to be read as {expected}, but it is {_describe(storage.name)}"
        raise CheckpointError(f"{checkpoint.folder}: {detail}; use {storage.name} or auto")
    return storage


def _describe(name: StorageName) -> str:
    return {
        "plain": f"not quantised: it has neither a quantization_config in config.json nor a {DESCRIPTION}",
        "mxfp4": "MXFP4 by the quantization_config in its config.json",
        "int4x2": "int4x2 by the quantization_config in its config.json",
        "modelslim": f"ModelSlim's by its {DESCRIPTION}",
    }[name]


def _found(checkpoint: Checkpoint, config: KimiK3Config) -> Storage:
    description = read_description(checkpoint.folder)
    if description is None:
        if faults := list(_signs_of_another(checkpoint, config)):
            raise CheckpointError.from_faults(checkpoint.folder, faults)
        form = _PACKED.get(config.quantization or "", PLAIN)
        return Storage(config.quantization or "plain", form, folder=checkpoint.folder)
    if config.quantization:
        detail = f"has a quantization_config for {config.quantization}, but the folder has a {DESCRIPTION}; remove one"
        raise CheckpointError.from_faults(checkpoint.folder, [Fault("two quantizations", "config.json", detail)])
    there = {normalise(name): name for name in checkpoint.entries}
    described = {normalise(name) for name in description.types}
    faults = [
        Fault("described but missing", name, f"{DESCRIPTION} has it as {kind}, no shard has it")
        for name, kind in description.types.items()
        if normalise(name) not in there
    ]
    notes: list[Fault] = []
    for name, published in there.items():
        if name not in described and weight_of(name)[0] not in description.forms:
            dtype = checkpoint.entries[published].dtype
            fault = Fault("not described", published, f"{DESCRIPTION} does not say how it is stored")
            (notes if dtype in FLOAT else faults).append(fault)
    experts = {form for weight, form in description.forms.items() if ".mlp.experts." in weight}
    return Storage(
        "modelslim",
        experts.pop() if len(experts) == 1 else PLAIN,
        description.forms,
        tuple(faults),
        tuple(notes),
        checkpoint.folder,
    )


def _signs_of_another(checkpoint: Checkpoint, config: KimiK3Config) -> Iterator[Fault]:
    """Tensors of a storage that nothing in the folder announces, and the other way round."""
    counts = {suffix: 0 for suffix in (".weight_packed", ".weight_first", ".scale_bias", ".weight_offset")}
    for name in checkpoint.entries:
        for suffix in counts:
            counts[suffix] += name.endswith(suffix)
    for suffix, form, told in ((".weight_packed", "mxfp4", "MXFP4"), (".weight_first", "int4x2", "int4x2")):
        if counts[suffix] and config.quantization != form:
            detail = f"no quantization_config says {told}, but {counts[suffix]} tensors are named *{suffix}"
            yield Fault("missing quantization", "config.json", detail)
        if config.quantization == form and not counts[suffix]:
            detail = f"quantization_config says {told}, but no tensor is named *{suffix}"
            yield Fault("wrong quantization", "config.json", detail)
    if count := counts[".scale_bias"] + counts[".weight_offset"]:
        detail = f"not in the folder, but {count} tensors are named *.scale_bias or *.weight_offset, as ModelSlim's are"
        yield Fault("missing quantization", DESCRIPTION, detail)
