"""How a folder stores its weights, and whether config.json, the description and the tensors agree about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kimi_k3_npu.checkpoint.modelslim import DESCRIPTION, read_description
from kimi_k3_npu.checkpoint.names import NameMap, normalise, weight_of
from kimi_k3_npu.checkpoint.reader import Checkpoint
from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.errors import CheckpointError, Fault
from kimi_k3_npu.formats import FLOAT, FORMATS, MODELSLIM, PLAIN, Format, expert_formats, keepers

#: How experts are kept when nobody says how: as they are stored. And that, if they are not plain.
AUTO, PACKED = "auto", "packed"


def expert_options() -> tuple[str, ...]:
    """How experts can be asked to be kept in memory: AUTO, PACKED, plain, or in another format that holds them."""
    others = (option for option, each in expert_formats().items() if any(name != each.name for name in each.takes))
    return AUTO, PACKED, PLAIN.option, *others


@dataclass(frozen=True)
class Storage:
    """How the weights of one folder are stored.

    Args:
        name: Of the kind of folder: that of a format, or MODELSLIM.
        experts: The format of the routed experts; plain when they are not all of one.
        formats: The format of weights by their normalised names, as far as a description says. Other weights are plain.
        faults: Where the description and the tensors disagree.
        notes: What is unusual about the description but harmless.
        folder: Which, for messages.
    """

    name: str
    experts: Format = PLAIN
    formats: dict[str, Format] | None = None
    faults: tuple[Fault, ...] = field(default=())
    notes: tuple[Fault, ...] = field(default=())
    folder: Path = Path()

    def format_of(self, weight: str) -> Format:
        """The format that `weight`, a normalised name, is stored in."""
        if self.formats is not None:
            return self.formats.get(weight, PLAIN)
        return self.experts if ".mlp.experts." in weight else PLAIN

    def faults_beside(self, others: Iterable[Fault]) -> list[Fault]:
        """The faults, without those of tensors that one of `others` names too."""
        known = {fault.name for fault in others}
        return [fault for fault in self.faults if fault.name not in known]

    def names(self, experts: Format = PLAIN) -> NameMap:
        """The name map for a model that keeps its experts as `experts`."""
        return NameMap(self.format_of, experts)

    def keep_experts(self, wanted: str = AUTO) -> Format:
        """The format in which a model is to keep the experts, `wanted` being one of `expert_options`.

        Raises:
            CheckpointError: What is stored here cannot be kept as `wanted`.
        """
        able = keepers(self.experts)
        if wanted == PLAIN.option or (wanted == AUTO and not able):
            return PLAIN
        if wanted in (AUTO, PACKED) and able:
            return able[0]
        others = {option: each for option, each in expert_formats().items() if each in able and option != PLAIN.option}
        if wanted in others:
            return others[wanted]
        what = f"its experts are {self.experts.title}" if able else "its experts are not packed"
        choices = (AUTO, *((PACKED,) if able else ()), PLAIN.option, *(o for o in others if o in expert_options()))
        raise CheckpointError(f"{self.folder}: {what}; use expert_weights {' or '.join(map(repr, choices))}")


def read_storage(checkpoint: Checkpoint, config: KimiK3Config, expected: str = AUTO) -> Storage:
    """How the weights in the folder of `checkpoint` are stored.

    Args:
        expected: What the caller was told, such as an engine's quantisation flag; "auto" takes what there is.

    Raises:
        CheckpointError: config.json, the description and the tensors do not tell the same, or not what was expected.
    """
    storage = _found(checkpoint, config)
    if expected not in (AUTO, storage.name):
        detail = f"asked to be read as {expected}, but it is {_describe(storage.name)}"
        raise CheckpointError(f"{checkpoint.folder}: {detail}; use {storage.name} or auto")
    return storage


def _describe(name: str) -> str:
    if name == PLAIN.folder:
        return f"not quantised: it has neither a quantization_config in config.json nor a {DESCRIPTION}"
    if name == MODELSLIM:
        return f"ModelSlim's by its {DESCRIPTION}"
    return f"{FORMATS[name].title} by the quantization_config in its config.json"


def _found(checkpoint: Checkpoint, config: KimiK3Config) -> Storage:
    description = read_description(checkpoint.folder)
    if description is None:
        if faults := list(_signs_of_another(checkpoint, config)):
            raise CheckpointError.from_faults(checkpoint.folder, faults)
        format = FORMATS[config.quantization or PLAIN.name]
        return Storage(format.folder, format, folder=checkpoint.folder)
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
        if name not in described and weight_of(name)[0] not in description.formats:
            dtype = checkpoint.entries[published].dtype
            fault = Fault("not described", published, f"{DESCRIPTION} does not say how it is stored")
            (notes if dtype in FLOAT else faults).append(fault)
    experts = {format for weight, format in description.formats.items() if ".mlp.experts." in weight}
    return Storage(
        MODELSLIM,
        experts.pop() if len(experts) == 1 else PLAIN,
        description.formats,
        tuple(faults),
        tuple(notes),
        checkpoint.folder,
    )


def _signs_of_another(checkpoint: Checkpoint, config: KimiK3Config) -> Iterator[Fault]:
    """Tensors of a storage that nothing in the folder announces, and the other way round."""
    counts = {each: 0 for each in FORMATS.values() if each.sign}
    for name in checkpoint.entries:
        for each in counts:
            counts[each] += name.endswith(each.sign)
    described = [each for each in counts if each.folder == MODELSLIM]
    for each, count in counts.items():
        if each in described:
            continue
        if count and config.quantization != each.name:
            detail = f"no quantization_config says {each.title}, but {count} tensors are named *{each.sign}"
            yield Fault("missing quantization", "config.json", detail)
        if config.quantization == each.name and not count:
            detail = f"quantization_config says {each.title}, but no tensor is named *{each.sign}"
            yield Fault("wrong quantization", "config.json", detail)
    if count := sum(counts[each] for each in described):
        signs = " or ".join(f"*{each.sign}" for each in described)
        detail = f"not in the folder, but {count} tensors are named {signs}, as ModelSlim's are"
        yield Fault("missing quantization", DESCRIPTION, detail)
