"""Load a published checkpoint into a model: only this rank's slices, streamed, with every fault reported before use."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from kimi_k3_npu.checkpoint.folder import SHARD_PATTERNS
from kimi_k3_npu.checkpoint.names import ROTATION, VISION_PREFIXES, normalise
from kimi_k3_npu.checkpoint.plan import Assignment, LoadPlan, plan_loading, records_of
from kimi_k3_npu.checkpoint.reader import Checkpoint, collector_paused
from kimi_k3_npu.checkpoint.storage import AUTO, Storage, read_storage
from kimi_k3_npu.checkpoint.stream import bytes_to_read, read_weights
from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.errors import CheckpointError, Fault, KimiK3Error
from kimi_k3_npu.formats import FORMATS, PLAIN
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
from kimi_k3_npu.parallel.layout import ParallelLayout
from kimi_k3_npu.parallel.mesh import Mesh
from kimi_k3_npu.parallel.shard import Layer, layers

__all__ = ["VISION_PREFIXES", "Progress", "load_model", "load_weights"]

#: Called with the bytes read so far and the bytes to read.
Progress = Callable[[int, int], None]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@collector_paused()
def load_model(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    layout: ParallelLayout | None = None,
    rank: int = 0,
    expert_weights: str = AUTO,
    quantization: str = AUTO,
    vision: bool | None = None,
    scan: bool = True,
    progress: Progress | None = None,
) -> KimiK3ForCausalLM:
    """The model of the checkpoint folder `path`, ready to run.

    Args:
        device: Where the weights go.
        dtype: Of weights and activations; None takes the config's. Router, gates, states and mixers are always fp32.
        layout: How the model is spread over ranks; only this rank's slices are read. With torch.distributed
            initialised the model can run; without, it can only be looked at.
        rank: Which rank of `layout` to build when torch.distributed is not initialised.
        expert_weights: How experts stay in memory: "auto" as they are stored (packed ones are expanded while in use),
            "packed" the same and an error for plain ones, "bf16" expanded once, to `dtype` (MXFP4's values are exact in
            bf16), "int4x2" MXFP4 as pairs of int4, exactly.
        quantization: What the folder is said to be; an error if it is something else.
        vision: None takes images if and only if the folder has vision weights. False leaves them unread, and warns;
            True insists on them.
        scan: Look inside the weights: for NaN and infinity, and whether 4-bit codes fit their scales.
        progress: Called as bytes arrive.

    Raises:
        KimiK3Error: `dtype` is none that a model can be kept in.
        ConfigError: config.json is missing, broken, or not a model of this package.
        LayoutError: The layout cannot split this model.
        CheckpointError: The tensors are not exactly those of the model; lists all faults.
    """
    if dtype is not None and dtype not in DTYPES.values():
        raise KimiK3Error(f"dtype is {dtype!r}; supported: {', '.join(map(str, DTYPES.values()))}")
    config = KimiK3Config.from_pretrained(path)
    checkpoint = Checkpoint.open(path)
    storage = read_storage(checkpoint, config, quantization)
    dtype = dtype or config_dtype(config)
    if dtype in storage.experts.too_narrow:
        what = f"{storage.experts.title} experts do not expand to {str(dtype).removeprefix('torch.')}"
        raise CheckpointError(f"{path}: {what}; use dtype bfloat16 or float32")
    layout = layout or ParallelLayout()
    layout.check(config.text, expert_group=storage.experts.group)
    mesh = Mesh.distributed(layout) if layout.world > 1 and dist.is_initialized() else Mesh.inspect(layout, rank)
    has_vision, experts = has_vision_weights(checkpoint), storage.keep_experts(expert_weights).name
    if vision and not has_vision:
        raise CheckpointError(f"{path}: has no vision weights ({', '.join(VISION_PREFIXES)}), so it takes no images")
    skip = VISION_PREFIXES if has_vision and vision is False else ()
    if skip:
        warnings.warn(f"{path}: its vision weights are not loaded (vision=False); it takes no images", stacklevel=2)
    with torch.device(device):
        model = empty_model(config, checkpoint, mesh, dtype=dtype, experts=experts, vision=not skip)
    load_weights(model, checkpoint, storage, progress, scan=scan, skip=skip)
    warn_of(checkpoint.folder, file_notes(checkpoint))
    return model.requires_grad_(False).eval()


def empty_model(
    config: KimiK3Config,
    checkpoint: Checkpoint,
    mesh: Mesh | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    experts: str = "plain",
    vision: bool = True,
) -> KimiK3ForCausalLM:
    """The model that `checkpoint` fills, without its weights; with vision if the checkpoint has it and it is wanted."""
    return KimiK3ForCausalLM(
        config,
        mesh,
        dtype=dtype,
        experts=experts,
        vision=vision and has_vision_weights(checkpoint),
        rotated_vision=ROTATION in map(normalise, checkpoint.entries),
    )


def has_vision_weights(checkpoint: Checkpoint) -> bool:
    return any(name.startswith(VISION_PREFIXES) and normalise(name) != ROTATION for name in checkpoint.entries)


def load_weights(
    model: KimiK3ForCausalLM,
    checkpoint: Checkpoint,
    storage: Storage,
    progress: Progress | None = None,
    *,
    scan: bool = True,
    skip: Collection[str] = (),
) -> None:
    """Fill every parameter of `model` from `checkpoint`, leaving out tensors whose names start with one of `skip`.

    What is unusual but harmless is warned of. Raises CheckpointError with all faults; the model is then not to be used,
    unless `check_weights` would have raised them: then nothing was changed.
    """
    plan = check_weights(model, checkpoint, storage, skip=skip)
    store, done, total = _Store(model), 0, bytes_to_read(checkpoint, plan.assignments)

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress:
            progress(done, total)

    faults: list[Fault] = []
    for members, assignments in _in_turn(model, plan.assignments):
        for layer in members:
            layer.restore()
        for assignment, tensors in read_weights(checkpoint, assignments, faults, scan=scan, on_bytes=count):
            store.put(assignment, tensors)
        if not faults:
            for layer in members:
                layer.prepare()
    if faults:
        raise CheckpointError.from_faults(checkpoint.folder, faults)
    warn_of(checkpoint.folder, [*storage.notes, *plan.notes])


def check_weights(
    model: KimiK3ForCausalLM, checkpoint: Checkpoint, storage: Storage, *, skip: Collection[str] = ()
) -> LoadPlan:
    """What of `checkpoint` fills what of `model`. Changes nothing; raises CheckpointError with all faults that show
    before weights are read."""
    plan = plan_loading(model, checkpoint.entries, storage.names(FORMATS[model.experts]), skip=skip)
    faults = [*plan.faults, *storage.faults_beside(plan.faults)]
    small = [assignment for assignment in plan.assignments if assignment.target.row.fix]
    for _ in read_weights(checkpoint, small, faults):
        pass  # what is wrong with them is said before all is read
    if faults:
        raise CheckpointError.from_faults(checkpoint.folder, faults)
    return plan


def _in_turn(
    model: KimiK3ForCausalLM, assignments: Sequence[Assignment]
) -> Iterator[tuple[list[Layer], list[Assignment]]]:
    """Layers that are filled together, and what fills them.

    That is all, but what an earlier load has laid out for the device comes layer by layer: until its new values are
    laid out, memory holds it twice.
    """
    laid_out = {path: layer for path, layer in layers(model) if layer.is_laid_out}
    others = [layer for path, layer in layers(model) if path not in laid_out]
    shares: dict[str, list[Assignment]] = {"": [], **{path: [] for path in laid_out}}
    for assignment in assignments:
        path = assignment.target.parameter.rpartition(".")[0]
        shares[path if path in laid_out else ""].append(assignment)
    yield others, shares.pop("")
    for path, share in shares.items():
        yield [laid_out[path]], share


def file_notes(checkpoint: Checkpoint) -> Iterator[Fault]:
    """What is unusual about the files of a checkpoint but harmless."""
    for name in checkpoint.unindexed_files:
        if any(fnmatchcase(name, pattern) for pattern in SHARD_PATTERNS):
            yield Fault("not part of the checkpoint", name, "looks like a shard, but the index does not name it")
    for file, metadata in checkpoint.metadata.items():
        if "total_size" in metadata and metadata["total_size"] != (found := checkpoint.total_bytes):
            detail = f"total_size is {metadata['total_size']}, the tensors have {found} bytes"
            yield Fault("wrong total", file, detail)


def warn_of(folder: Path, notes: Iterable[Fault]) -> None:
    """One warning for each kind of `notes`."""
    kinds: dict[str, list[Fault]] = {}
    for note in notes:
        kinds.setdefault(note.kind, []).append(note)
    for kind, members in kinds.items():
        others = f" (and {len(members) - 1} others)" if len(members) > 1 else ""
        warnings.warn(f"{folder}: {kind}: {members[0].name}: {members[0].detail}{others}", stacklevel=3)


class _Store:
    """Puts weights into the parameters of a model."""

    def __init__(self, model: KimiK3ForCausalLM) -> None:
        self._experts = FORMATS[model.experts]
        self._model = model
        self._records = records_of(model)
        self._started: set[str] = set()

    @torch.no_grad()
    def put(self, assignment: Assignment, tensors: Mapping[str, Tensor]) -> None:
        target = assignment.target
        if target.row.is_expert and self._experts is not PLAIN:
            for kept, tensor in self._experts.takes[target.format.name](tensors).items():
                self._place(target.parameter + kept, target.piece, tensor.shape).copy_(tensor)
            return
        parameter = self._model.get_parameter(target.parameter)
        if target.row.fix:
            values = target.row.fix(tensors[".weight"], assignment.record.shape)[assignment.record.source]
        else:
            values = target.format.values(tensors, parameter.dtype)
        place = self._place(target.parameter, target.piece, values.shape)
        if target.row.multiply and target.parameter in self._started:
            place.mul_(values.to(parameter))
        else:
            place.copy_(values)
            self._started.add(target.parameter)

    def _place(self, parameter: str, piece: str, shape: torch.Size) -> Tensor:
        """The part of `parameter` that `piece` fills, in the `shape` in which it comes."""
        place = self._model.get_parameter(parameter)[self._records[parameter][piece].target]
        return place.view(shape)


def config_dtype(config: KimiK3Config) -> torch.dtype:
    """The dtype that the weights were published in. Raises CheckpointError for one that cannot be loaded."""
    if config.dtype not in DTYPES:
        raise CheckpointError(f"config.json: dtype is {config.dtype!r}; supported: {', '.join(DTYPES)}")
    return DTYPES[config.dtype]
