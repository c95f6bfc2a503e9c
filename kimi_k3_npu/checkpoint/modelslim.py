"""`quant_model_description.json`, in which ModelSlim (format AscendV1) says how each tensor of a folder is stored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kimi_k3_npu.checkpoint.names import normalise, weight_of
from kimi_k3_npu.checkpoint.safetensors_header import load_json
from kimi_k3_npu.errors import CheckpointError, Fault
from kimi_k3_npu.formats import FORMATS, MODELSLIM, PLAIN, Format

DESCRIPTION = "quant_model_description.json"

#: The types of tensors that are understood.
TYPES: dict[str, Format] = {
    "FLOAT": PLAIN,
    **{each.title: each for each in FORMATS.values() if each.folder == MODELSLIM},
}


def type_of(format: Format) -> str:
    """The type by which a description knows a format."""
    return next(kind for kind, each in TYPES.items() if each is format)


@dataclass(frozen=True)
class Description:
    """What a description says.

    Args:
        types: The type of each tensor by its name as published.
        formats: The format of each weight by its normalised name.
    """

    types: dict[str, str]
    formats: dict[str, Format]


def read_description(folder: Path) -> Description | None:
    """The description in `folder`; None if there is none.

    Raises:
        CheckpointError: It is no JSON object of types by tensor name, or has types that are not understood; lists all.
    """
    file = folder / DESCRIPTION
    if not file.is_file():
        return None
    faults: list[Fault] = []

    def twice(key: str) -> None:
        faults.append(Fault("duplicate key", key, f"twice in {DESCRIPTION}"))

    try:
        fields = load_json(file.read_bytes(), twice)
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from None
    # Settings are beside the tensors, whose names alone have dots.
    types = {name: value for name, value in fields.items() if "." in name}
    if not types:
        raise CheckpointError(f"{file}: describes no tensor; expected an object with a type for every tensor's name")
    if group := fields.get("group_size"):
        detail = "scales by group of inputs are not supported, only one for each output (group_size 0)"
        faults.append(Fault("unsupported quantization", DESCRIPTION, f"group_size is {group!r}: {detail}"))
    for name, kind in types.items():
        if not isinstance(kind, str) or kind not in TYPES:
            detail = f"{DESCRIPTION} has it as {kind!r:.80}; understood: {', '.join(TYPES)}"
            faults.append(Fault("unsupported quantization", name, detail))
    if faults:
        raise CheckpointError.from_faults(folder, faults)
    return Description(types, _formats(folder, types))


def _formats(folder: Path, types: dict[str, str]) -> dict[str, Format]:
    """The format of each weight: what the entry of its codes says, with which the entries of its other parts agree."""
    formats: dict[str, Format] = {}
    first: dict[str, str] = {}
    faults = []
    for name, kind in sorted(types.items(), key=lambda item: len(item[0])):
        weight, _ = weight_of(normalise(name))
        format = formats.setdefault(weight, TYPES[kind])
        first.setdefault(weight, name)
        if format is not TYPES[kind]:
            detail = f"{DESCRIPTION} has it as {kind}, but {first[weight]} as {types[first[weight]]}"
            faults.append(Fault("contradictory description", name, detail))
    if faults:
        raise CheckpointError.from_faults(folder, faults)
    return formats
