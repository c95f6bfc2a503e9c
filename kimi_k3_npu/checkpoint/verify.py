"""Find everything that is wrong with a checkpoint folder, without running it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kimi_k3_npu.checkpoint.checksums import Checksums
from kimi_k3_npu.checkpoint.load import Progress, config_dtype, empty_model, file_notes
from kimi_k3_npu.checkpoint.manifest import Extent, Manifest, expand, load_manifest
from kimi_k3_npu.checkpoint.names import normalise
from kimi_k3_npu.checkpoint.plan import LoadPlan, plan_loading, records_of
from kimi_k3_npu.checkpoint.reader import Checkpoint, ReadRequest
from kimi_k3_npu.checkpoint.storage import Storage, read_storage
from kimi_k3_npu.checkpoint.stream import read_weights
from kimi_k3_npu.config import KimiK3Config, read_config_file
from kimi_k3_npu.errors import CheckpointError, ConfigError, Fault, LayoutError
from kimi_k3_npu.parallel.layout import ParallelLayout
from kimi_k3_npu.parallel.mesh import Mesh


@dataclass
class Examination:
    """What a folder says about itself, as far as it could be followed; what could not be is None.

    Args:
        faults: What keeps the checkpoint from being loaded, or makes it another than the manifest's.
        notes: What is unusual but harmless.
    """

    folder: Path
    config: KimiK3Config | None = None
    checkpoint: Checkpoint | None = None
    storage: Storage | None = None
    plan: LoadPlan | None = None
    faults: list[Fault] = field(default_factory=list)
    notes: list[Fault] = field(default_factory=list)


def verify(
    folder: str | Path,
    *,
    layout: ParallelLayout | None = None,
    against: str | Path | None = None,
    data: bool = True,
    progress: Progress | None = None,
) -> Examination:
    """Look for every fault: in config.json, the files, names, shapes and dtypes, and with `data` inside the tensors.

    Args:
        layout: Whether each of its ranks could load its part, too.
        against: A published manifest by name, or a file that `weights checksum` wrote.
        progress: Called with the bytes read so far and the bytes to read.
    """
    found = examine(Path(folder))
    manifest = None if against is None else _manifest(against)
    if layout and found.config and found.checkpoint and found.storage:
        found.faults.extend(_layout_faults(found.config, found.checkpoint, found.storage, layout))
    if manifest and found.checkpoint:
        found.faults.extend(_manifest_faults(manifest, found))
    if data and found.checkpoint:
        _read_all(found, manifest if isinstance(manifest, Checksums) else None, progress)
    found.faults = list(dict.fromkeys(found.faults))
    return found


def examine(folder: Path) -> Examination:
    """Follow what config.json and the headers of the files say."""
    found = Examination(folder)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found.config = KimiK3Config.from_pretrained(folder)
            config_dtype(found.config)
        found.notes += [Fault("config", "config.json", str(w.message).removeprefix("config.json: ")) for w in caught]
    except (CheckpointError, ConfigError) as error:
        found.faults.append(Fault("config", "config.json", str(error).removeprefix("config.json: ")))
    try:
        found.checkpoint = Checkpoint.open(folder)
        found.notes += file_notes(found.checkpoint)
        if found.config:
            found.storage = read_storage(found.checkpoint, found.config)
    except CheckpointError as error:
        found.faults += error.faults or [Fault("unreadable", folder.name, str(error).removeprefix(f"{folder}: "))]
    if found.config and found.checkpoint and found.storage:
        with torch.device("meta"):
            model = empty_model(found.config, found.checkpoint)
        found.plan = plan_loading(model, found.checkpoint.entries, found.storage.names())
        found.faults += [*found.plan.faults, *found.storage.faults_beside(found.plan.faults)]
        found.notes += [*found.storage.notes, *found.plan.notes]
    return found


def _layout_faults(
    config: KimiK3Config, checkpoint: Checkpoint, storage: Storage, layout: ParallelLayout
) -> Iterator[Fault]:
    published = {normalise(name): name for name in checkpoint.entries}
    try:
        layout.check(config.text, expert_group=storage.experts.group)
        for rank in range(layout.world):
            mesh = Mesh.inspect(layout, rank)
            with torch.device("meta"):
                model = empty_model(config, checkpoint, mesh, experts=storage.keep_experts().name)
            names = storage.names(storage.keep_experts())
            # What belongs to no rank is known already, and half a million names take seconds for each rank.
            own = [
                published[name]
                for parameter, pieces in records_of(model).items()
                for piece in pieces
                for _, name in names.sources(parameter, piece)
                if name in published
            ]
            yield from plan_loading(model, {name: checkpoint.entries[name] for name in own}, names).faults
    except LayoutError as error:
        yield Fault("layout", str(layout), str(error))


def _manifest(against: str | Path) -> Manifest | Checksums:
    file = Path(against)
    return Checksums.read(file) if file.is_file() else load_manifest(str(against))


def _manifest_faults(manifest: Manifest | Checksums, found: Examination) -> Iterable[Fault]:
    assert found.checkpoint
    if isinstance(manifest, Checksums):
        faults = [*manifest.header_faults(found.checkpoint.entries)]
        return [*manifest.config_faults(read_config_file(found.folder)), *faults] if found.config else faults
    if found.config is None:
        return []
    try:
        return list(_published_faults(manifest, found.config, found.checkpoint))
    except ConfigError as error:
        return [Fault("another model than the manifest's", "config.json", str(error))]


def _published_faults(manifest: Manifest, config: KimiK3Config, checkpoint: Checkpoint) -> Iterator[Fault]:
    wanted = {spec.name: spec for spec in expand(manifest, Extent.of(config))}
    for name, spec in wanted.items():
        entry = checkpoint.entries.get(name)
        if entry is None:
            yield Fault("missing, by the manifest", name, f"{manifest.name} has it, no shard has it")
        elif (entry.dtype, entry.shape) != (spec.dtype, spec.shape):
            words = [f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in (entry, spec)]
            yield Fault("differs from the manifest", name, f"is {words[0]}, {manifest.name} has {words[1]}")
    for name in checkpoint.entries:
        if name not in wanted:
            yield Fault("not in the manifest", name, f"{manifest.name} does not have it")


def _read_all(found: Examination, checksums: Checksums | None, progress: Progress | None) -> None:
    """Look inside all tensors: those of the plan as the loader does, others only where there are checksums."""
    checkpoint, faults = found.checkpoint, found.faults
    assert checkpoint
    assignments = found.plan.assignments if found.plan else []
    planned = {assignment.name for assignment in assignments}
    others = [name for name in checkpoint.entries if name not in planned] if checksums else []
    total = sum(checkpoint.entries[name].nbytes for name in (*planned, *others))
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress:
            progress(done, total)

    def compare(name: str, tensor: torch.Tensor) -> None:
        if checksums and (fault := checksums.content_fault(name, tensor)):
            faults.append(fault)

    for _ in read_weights(checkpoint, assignments, faults, on_bytes=count, on_tensor=compare):
        pass
    for request, tensor in checkpoint.stream(map(ReadRequest, others), on_bytes=count):
        compare(request.name, tensor)
