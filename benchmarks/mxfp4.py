"""How fast is MXFP4 expanded to bfloat16 on a CPU, beside the library that engines use and a plain copy?

One expert's w1 of Kimi-K3, [3072, 3584], one thread. The three take turns in one process; medians, in gigabytes of the
result a second. Both expansions must give the same values. Needs compressed-tensors (requirements/bench.txt); `make
bench` installs it, and so do

    pip install --no-deps --target build/bench -r requirements/bench.txt
    PYTHONPATH=build/bench python benchmarks/mxfp4.py [--rounds 15] [--out FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from machine import described
from report import write
from torch import Tensor

from kimi_k3_npu.ops.quant import mxfp4_dequantize_into

RESULTS = Path(__file__).parent / "results" / "mxfp4.json"
ROWS, INPUTS = 3072, 3584


def library(packed: Tensor, scale: Tensor) -> Callable[[], Tensor]:
    """compressed-tensors' expansion, as its compressed linear layers call it."""
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    tensors = {"weight_packed": packed, "weight_scale": scale}
    return lambda: MXFP4PackedCompressor.decompress(tensors, scheme)["weight"]


def measure(rounds: int) -> dict[str, float]:
    torch.manual_seed(0)
    packed = torch.randint(0, 256, (ROWS, INPUTS // 2), dtype=torch.uint8)
    scale = torch.randint(110, 130, (ROWS, INPUTS // 32), dtype=torch.uint8)
    out, copied = torch.empty(ROWS, INPUTS, dtype=torch.bfloat16), torch.zeros(ROWS, INPUTS, dtype=torch.bfloat16)
    runs: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: mxfp4_dequantize_into(packed, scale, out),
        "compressed_tensors": library(packed, scale),
        "copy": lambda: copied.copy_(out),
    }
    theirs = runs["compressed_tensors"]()
    assert torch.equal(runs["ours"]().to(theirs.dtype), theirs), "the two expansions differ"
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: out.nbytes / median(times) / 1e9 for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file; results/mxfp4.json if not given")
    options = parser.parse_args()
    if importlib.util.find_spec("compressed_tensors") is None:
        sys.exit("compressed-tensors is not installed; run `make bench`, or see requirements/bench.txt")
    torch.set_num_threads(1)
    speeds = measure(options.rounds)
    result = {
        "rounds": options.rounds,
        "gigabytes_per_second": speeds,
        "times_compressed_tensors": speeds["ours"] / speeds["compressed_tensors"],
        "share_of_copy": speeds["ours"] / speeds["copy"],
    }
    write(options.out, **result)
    print(described())
    for name, speed in speeds.items():
        print(f"{name:<19} {speed:>7.3f} GB/s")
    print(f"times faster than compressed-tensors   {result['times_compressed_tensors']:.1f}   (to be at least 15)")
    print(f"share of a plain copy of the result    {100 * result['share_of_copy']:.1f} %")


if __name__ == "__main__":
    main()
