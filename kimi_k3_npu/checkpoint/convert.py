"""Convert a checkpoint to another format of its routed experts, shard by shard.

A shard of the result is written beside its final place and moved there when it is whole. So whatever stops the
conversion leaves whole shards, and the next run makes the others. What was asked for, and how exact the finished shards
are, is kept in the folder `.conversion` until everything else is in place.

Routed experts get the wanted format. Every other tensor stays byte for byte what it is, but for those that ModelSlim
quantised, which become bfloat16.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from kimi_k3_npu.checkpoint.convert_shard import Shard, plan_shards
from kimi_k3_npu.checkpoint.error_report import ErrorReport
from kimi_k3_npu.checkpoint.folder import contents
from kimi_k3_npu.checkpoint.load import Progress, empty_model
from kimi_k3_npu.checkpoint.modelslim import DESCRIPTION, type_of
from kimi_k3_npu.checkpoint.plan import plan_loading
from kimi_k3_npu.checkpoint.reader import Checkpoint
from kimi_k3_npu.checkpoint.storage import read_storage
from kimi_k3_npu.checkpoint.writer import move, write_text
from kimi_k3_npu.config import KimiK3Config, read_config_file
from kimi_k3_npu.errors import CheckpointError
from kimi_k3_npu.formats import MODELSLIM, Format, convertible
from kimi_k3_npu.locks import writing_to

#: The folder of an unfinished conversion, and in a finished one the report of what was lost.
WORK, REPORT = ".conversion", "conversion.json"

#: In WORK: what is converted to what.
_JOB = "job.json"

#: To be raised when the same input would give other bytes, so that no conversion is finished by another version.
VERSION = 2


def convert(
    source: str | Path,
    out: str | Path,
    to: str,
    *,
    jobs: int = 1,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> ErrorReport:
    """Write the checkpoint in folder `source` to folder `out`, with its experts as `to`; go on if `out` is half done.

    The result is the same, byte for byte, however many runs it took and whatever `jobs`. Takes for each job up to 256
    MiB of what is read ahead, and some copies of one expert's weight in fp32.

    Args:
        jobs: Shards worked on at a time, each by one thread.
        device: Where the arithmetic is done.
        progress: Called with the bytes read so far and the bytes to read.

    Raises:
        CheckpointError: The source is faulty, holds experts of this format already, or `out` holds something else or is
            being written to.
    """
    source, out = Path(source), Path(out)
    checkpoint = Checkpoint.open(source)
    config = KimiK3Config.from_pretrained(source)
    storage = read_storage(checkpoint, config)
    format = convertible()[to]
    if not config.text.num_experts or storage.experts is format:
        already = f"its experts are {storage.experts.title} already"
        raise CheckpointError(f"{source}: {already if config.text.num_experts else 'has no routed experts'}")
    with torch.device("meta"):
        plan = plan_loading(empty_model(config, checkpoint), checkpoint.entries, storage.names())
    if faults := [*plan.faults, *storage.faults_beside(plan.faults)]:
        raise CheckpointError.from_faults(source, faults)

    stem = "quant_model_weights" if format.folder == MODELSLIM else "model"
    shards = plan_shards(checkpoint, plan.assignments, format, stem)
    index = out / f"{stem}.safetensors.index.json"
    out.mkdir(parents=True, exist_ok=True)
    with writing_to(out, "conversion", CheckpointError):
        if _begin(out, _identity(checkpoint, to)):
            if not index.is_file():
                _write_shards(checkpoint, shards, out, jobs, device, progress or (lambda done, total: None))
                _write_the_rest(checkpoint, shards, out, to, index)
            _empty(out / WORK)
    with suppress(FileNotFoundError):  # the same conversion, started just now, saw that nothing else is left to do
        (out / WORK).rmdir()
    return ErrorReport.from_json(json.loads((out / REPORT).read_text(encoding="utf-8"))["blocks"])


def _identity(checkpoint: Checkpoint, to: str) -> str:
    """What is converted to what: names, sizes and times of the files, and the texts that say what they mean."""
    files = sorted({entry.file for entry in checkpoint.entries.values()})
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    texts = [
        (name, hashlib.sha256((checkpoint.folder / name).read_bytes()).hexdigest())
        for name in ("config.json", DESCRIPTION)
        if (checkpoint.folder / name).is_file()
    ]
    return json.dumps({"version": VERSION, "to": to, "files": stats, "texts": texts}, indent=1) + "\n"


def _begin(out: Path, identity: str) -> bool:
    """Make `out`, or see that what is in it is an unfinished conversion of the same. Returns whether it is to go on."""
    job = out / WORK / _JOB
    if job.is_file():
        if job.read_text(encoding="utf-8") == identity:
            return True
        what = "holds an unfinished conversion of another checkpoint, or to another form"
        raise CheckpointError(f"{out}: {what}; give a new folder, or remove this one")
    if job.parent.is_dir() and (out / REPORT).is_file():  # stopped when only the empty folder was left to remove
        return False
    if any(found.name != WORK for found in contents(out)):
        raise CheckpointError(f"{out}: not empty, and no unfinished conversion; give a new folder")
    job.parent.mkdir(exist_ok=True)
    write_text(job, identity)
    return True


def _write_shards(
    checkpoint: Checkpoint,
    shards: Sequence[Shard],
    out: Path,
    jobs: int,
    device: torch.device | str,
    progress: Progress,
) -> None:
    total, lock, done = sum(shard.bytes_to_read(checkpoint) for shard in shards), threading.Lock(), 0
    stop = threading.Event()

    def count(nbytes: int) -> None:
        nonlocal done
        if stop.is_set():
            raise _Stopped
        with lock:
            done += nbytes
            progress(done, total)

    def write(shard: Shard) -> None:
        if (out / shard.name).is_file():  # whole, or it would not be there
            count(shard.bytes_to_read(checkpoint))
            return
        writer, report = shard.write(checkpoint, out / WORK / f"{shard.name}.part", device, count)
        write_text(out / WORK / f"{shard.name}.json", json.dumps(report.to_json()))
        writer.finish(out / shard.name)

    threads = torch.get_num_threads()
    with ThreadPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        running = [pool.submit(write, shard) for shard in shards]
        try:
            for future in running:
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            torch.set_num_threads(threads)


class _Stopped(Exception):
    """Another shard has failed, or the user has had enough."""


def _write_the_rest(checkpoint: Checkpoint, shards: Sequence[Shard], out: Path, to: str, index: Path) -> None:
    """Write what is beside the shards. The index comes last: once it is there, so is everything."""
    source, report = checkpoint.folder, ErrorReport()
    for shard in shards:
        report.merge(ErrorReport.from_json(json.loads((out / WORK / f"{shard.name}.json").read_text(encoding="utf-8"))))
    weight_files = {entry.file.name for entry in checkpoint.entries.values()} | {*checkpoint.unindexed_files}
    for file in contents(source):
        own = file.name in ("config.json", DESCRIPTION, REPORT) or file.name.endswith(".safetensors.index.json")
        if file.is_file() and not own and file.name not in weight_files:
            shutil.copyfile(file, out / WORK / "copy.part")
            move(out / WORK / "copy.part", out / file.name)
    format = convertible()[to]
    _write_json(out / "config.json", _config(read_config_file(source), format))
    if format.folder == MODELSLIM:
        _write_json(out / DESCRIPTION, description_of(format, shards))
    _write_json(out / REPORT, {"source": source.resolve().name, "to": to, "blocks": report.to_json()})
    total = sum(spec.nbytes for shard in shards for spec in shard.tensors)
    weight_map = {spec.name: shard.name for shard in shards for spec in shard.tensors}
    _write_json(index, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _empty(work: Path) -> None:
    """Remove what is in `work`, last the file by which an unfinished conversion is known.

    The empty folder stays until the lock's file is gone: so a stop between the two is seen by the next run.
    """
    for left in sorted(work.iterdir(), key=lambda file: file.name == _JOB):
        left.unlink()


def _config(raw: dict[str, Any], format: Format) -> dict[str, Any]:
    """`raw` config.json with the quantization_config of the result."""
    text = raw.get("text_config", raw)
    for holder in (raw, text):
        holder.pop("quantization_config", None)
    if announced := format.quantization_config():
        text["quantization_config"] = announced
    return raw


def description_of(format: Format, shards: Sequence[Shard]) -> dict[str, Any]:
    """The text of DESCRIPTION for shards whose experts are in `format`."""
    types = {
        spec.name: type_of(conversion.format)
        for shard in shards
        for conversion in shard.conversions
        for spec in conversion.results.values()
    }
    return {"model_quant_type": format.title, "version": "1.0.0", "group_size": 0, **types}


def _write_json(file: Path, value: dict[str, Any]) -> None:
    write_text(file, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
