"""What does one rank of 64 read from disk, and how long does it take, beside a loader that walks over every tensor?

A synthetic MXFP4 checkpoint of 2.4 GB has K3's tensors, with half-size experts, 64 of them in each of 8 layers. Rank 1
of 64 keeps one expert of each layer and all that is not an expert. Three loaders fill its weights, each in a process
of its own, from files that are not in the page cache:

    ours         load_model, with all its checks
    unscanned    the same without looking inside the tensors
    safetensors  every tensor of every file in turn, of which the rank copies what it needs: what engines' loaders do

Measured are the time, the bytes that came from disk (read_bytes of /proc/self/io), and the largest resident memory
above what the process had before (VmHWM). Of several rounds, the medians.

Ranks that share a matrix by columns want a short run of each row, and a disk gives whole pages. The last lines are for
rank 1 of 16 and of 64 of an o_proj of full size, [7168, 12288] in bfloat16.

    python benchmarks/load.py [--rounds 5] [--folder DIR] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import described
from report import write
from safetensors import safe_open
from safetensors.torch import save_file

from kimi_k3_npu import KimiK3Config, load_model
from kimi_k3_npu.checkpoint.load import empty_model
from kimi_k3_npu.checkpoint.manifest import TensorSpec
from kimi_k3_npu.checkpoint.names import FP32_NAMES, published_name
from kimi_k3_npu.checkpoint.plan import plan_loading, records_of
from kimi_k3_npu.checkpoint.reader import Checkpoint
from kimi_k3_npu.checkpoint.storage import Storage
from kimi_k3_npu.checkpoint.stream import bytes_to_read
from kimi_k3_npu.checkpoint.writer import ShardWriter
from kimi_k3_npu.formats import FORMATS
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
from kimi_k3_npu.parallel.layout import ParallelLayout
from kimi_k3_npu.parallel.mesh import Mesh
from kimi_k3_npu.resources import resource_path

RESULTS = Path(__file__).parent / "results" / "load.json"
LAYOUT, RANK = ParallelLayout(tp=64, dp=64, ep=64, moe_dispatch="alltoall"), 1
LOADERS = ("ours", "unscanned", "safetensors")
TEXT = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_hidden_layers": 9,
    "attn_res_block_size": 4,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_experts": 64,
    "moe_intermediate_size": 1536,
    "routed_expert_hidden_size": 1792,
    "q_lora_rank": 256,
}
ATTENTION = {"num_heads": 8, "kda_layers": [1, 2, 3, 5, 6, 7], "full_attn_layers": [4, 8, 9]}

NAMES = Storage("mxfp4", FORMATS["mxfp4"]).names(FORMATS["mxfp4"])


def write_checkpoint(folder: Path) -> None:
    """A shard for each layer and one for the rest, as published."""
    raw = json.loads(resource_path("weights", "manifests", "kimi-k3-config.json").read_text())
    raw["text_config"] |= TEXT
    raw["text_config"]["linear_attn_config"] |= ATTENTION
    del raw["vision_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    config = KimiK3Config.from_hf(raw)
    with torch.device("meta"):
        model = KimiK3ForCausalLM(config, experts="mxfp4")
    shards: dict[int, list[TensorSpec]] = {}
    names = NAMES
    for parameter, pieces in records_of(model).items():
        for piece, record in pieces.items():
            for target, name in names.sources(parameter, piece):
                layer = int(name.split(".")[2]) + 1 if ".layers." in name else config.text.num_hidden_layers + 1
                dtype = target.part.stored.dtype or (torch.float32 if name.endswith(FP32_NAMES) else torch.bfloat16)
                spec = TensorSpec(published_name(name, config), target.part.shapes(record.shape)[0], dtype)
                shards.setdefault(layer, []).append(spec)
    weight_map = {}
    for number, specs in shards.items():
        file = f"model-{number:05}-of-{len(shards):06}.safetensors"
        writer = ShardWriter(folder / f"{file}.part", specs)
        for spec in specs:
            writer.write(spec.name, random_tensor(spec))
            weight_map[spec.name] = file
        writer.finish(folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def random_tensor(spec: TensorSpec) -> torch.Tensor:
    if spec.dtype == torch.uint8:
        low, high = (110, 130) if spec.name.endswith("_scale") else (0, 256)
        return torch.randint(low, high, spec.shape, dtype=torch.uint8)
    return torch.randn(spec.shape).to(spec.dtype)


def needed(folder: Path) -> tuple[int, int]:
    """The bytes that the rank needs, and those of the largest tensor."""
    checkpoint = Checkpoint.open(folder)
    with torch.device("meta"):
        model = empty_model(
            KimiK3Config.from_pretrained(folder), checkpoint, Mesh.inspect(LAYOUT, RANK), experts="mxfp4"
        )
    assignments = plan_loading(model, checkpoint.entries, NAMES).assignments
    return bytes_to_read(checkpoint, assignments), max(checkpoint.entries[a.name].nbytes for a in assignments)


def by_safetensors(folder: Path) -> object:
    checkpoint = Checkpoint.open(folder)
    with torch.device("meta"):
        model = empty_model(
            KimiK3Config.from_pretrained(folder), checkpoint, Mesh.inspect(LAYOUT, RANK), experts="mxfp4"
        )
    plan = plan_loading(model, checkpoint.entries, NAMES)
    sources = {assignment.name: assignment.source for assignment in plan.assignments}
    kept = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                tensor = opened.get_tensor(name)
                if name in sources:
                    kept.append(tensor[sources[name]].clone())
    return kept


def child(loader: str, folder: Path) -> None:
    """One cold load in this process; prints what it took."""
    torch.set_num_threads(1)
    loads: dict[str, Callable[[], object]] = {
        "ours": lambda: load_model(folder, layout=LAYOUT, rank=RANK),
        "unscanned": lambda: load_model(folder, layout=LAYOUT, rank=RANK, scan=False),
        "safetensors": lambda: by_safetensors(folder),
    }
    forget(folder)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts from here
    memory, disk, start = status("VmRSS"), read_bytes(), time.perf_counter()
    kept = loads[loader]()
    seconds = time.perf_counter() - start
    result = {"seconds": seconds, "disk": read_bytes() - disk, "memory": status("VmHWM") - memory}
    del kept
    print(json.dumps(result))


def forget(folder: Path) -> None:
    """Take the files out of the page cache."""
    for file in folder.iterdir():
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def columns(ranks: int) -> dict[str, float]:
    """What rank 1 of `ranks` reads of a matrix [7168, 12288] whose columns they share."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_file({"o_proj": torch.randn(7168, 12288).bfloat16()}, folder / "model.safetensors")
        checkpoint, width = Checkpoint.open(folder), 12288 // ranks
        forget(folder)
        disk, start = read_bytes(), time.perf_counter()
        part = checkpoint.read("o_proj", (slice(None), slice(width, 2 * width)))
        return {"needed": part.nbytes, "disk": read_bytes() - disk, "seconds": time.perf_counter() - start}


def status(field: str) -> int:
    """A size of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """The medians of each loader, the loaders taking turns, and what they are to be judged by."""
    found: dict[str, list[dict[str, float]]] = {loader: [] for loader in LOADERS}
    for _ in range(rounds):
        for loader in LOADERS:
            command = [sys.executable, __file__, "--child", loader, "--folder", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[loader].append(json.loads(done.stdout.splitlines()[-1]))
    medians = {loader: {key: median(run[key] for run in runs) for key in runs[0]} for loader, runs in found.items()}
    wanted, largest = needed(folder)
    ours = medians["ours"]
    return {
        "rounds": rounds,
        "checkpoint_bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        "needed_bytes": wanted,
        "largest_tensor_bytes": largest,
        "loaders": medians,
        "disk_over_needed": ours["disk"] / wanted,
        "times_faster": medians["safetensors"]["seconds"] / ours["seconds"],
        "memory_over_weights": ours["memory"] - wanted,
        "memory_allowed": largest + (256 << 20),
        "scan_seconds": ours["seconds"] - medians["unscanned"]["seconds"],
        "columns": {ranks: columns(ranks) for ranks in (16, 64)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is kept; made if it is not there")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file; results/load.json if not given")
    parser.add_argument("--child", choices=LOADERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.folder)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "config.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            write_checkpoint(folder)
        result = measure(folder, options.rounds)
    write(options.out, **result)
    show(result)


def show(result: dict[str, Any]) -> None:
    print(described())
    print(f"checkpoint {result['checkpoint_bytes'] / 1e6:,.0f} MB, rank needs {result['needed_bytes'] / 1e6:,.1f} MB")
    print(f"{'loader':<12} {'cold s':>8} {'disk MB':>9} {'memory MB':>10}")
    for loader, run in result["loaders"].items():
        print(f"{loader:<12} {run['seconds']:>8.3f} {run['disk'] / 1e6:>9,.1f} {run['memory'] / 1e6:>10,.1f}")
    print(f"bytes from disk / bytes needed   {result['disk_over_needed']:.3f}   (to be at most 1.05)")
    print(f"times faster than safetensors    {result['times_faster']:.1f}     (to be at least 5)")
    allowed = result["memory_allowed"] / 1e6
    print(f"memory above the weights         {result['memory_over_weights'] / 1e6:,.0f} MB (at most {allowed:,.0f})")
    print(f"looking inside the tensors takes {result['scan_seconds']:.3f} s of that")
    for ranks, run in result["columns"].items():
        sizes = f"{run['disk'] / 1e6:.1f} MB from disk for {run['needed'] / 1e6:.1f} MB"
        print(f"columns of an o_proj, 1 of {ranks}   {sizes} in {run['seconds']:.3f} s")


if __name__ == "__main__":
    main()
