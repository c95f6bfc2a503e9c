"""What does a longer context cost? Prompts of 1k to 64k tokens in a tiny K3, fp32, one thread.

Each length is measured in a process of its own: the prompt is read at once, then some tokens are generated. Per token
of the prompt, milliseconds and the peak of memory; and milliseconds for each token after it. With 3 KDA layers and one
MLA layer, and with the KDA layers alone, whose cost per token should not depend on the length. If matplotlib is
there (requirements/bench.txt), docs/scaling.png is drawn.

    python benchmarks/scale.py [--tokens 1024,...,65536] [--runs 1] [--plot FILE] [--out FILE]
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from report import finish, options

from kimi_k3_npu import KimiK3ForCausalLM
from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.model.attention import CachedAttention
from kimi_k3_npu.tiny import tiny_config

LENGTHS = ",".join(str(1024 << i) for i in range(7))
LAYERS = {"3 KDA, 1 MLA": ([1, 2, 3], [4]), "3 KDA": ([1, 2, 3], [])}
PLOT = Path(__file__).parents[1] / "docs" / "scaling.png"
STEPS = 16


def model_of(kda: list[int], mla: list[int]) -> KimiK3ForCausalLM:
    raw = tiny_config("fp32")
    text = raw["text_config"]
    text["num_hidden_layers"] = len(kda) + len(mla)
    text["linear_attn_config"] |= {"kda_layers": kda, "full_attn_layers": mla}
    model = KimiK3ForCausalLM(KimiK3Config.from_hf(raw), dtype=torch.float32, vision=False)
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.prepare()
    return model


def peak_bytes() -> int:
    """The most memory that was resident in this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@torch.inference_mode()
def one_run(layers: str, tokens: int) -> dict[str, float]:
    """Read a prompt and generate STEPS tokens: seconds of both, and the bytes by which memory had grown at its peak."""
    torch.set_num_threads(1)
    model = model_of(*LAYERS[layers])
    ids = torch.randint(0, 256, (tokens,))
    model.score([ids[:128]])  # warm up
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again from what is resident now
    before = peak_bytes()

    start = time.perf_counter()
    cache = model.new_cache(1, tokens + STEPS)
    slot = cache.join()

    def forward(part: torch.Tensor) -> torch.Tensor:
        attention = CachedAttention(cache, [slot], [len(part)])
        hidden = model(part, attention)[-1:]
        attention.commit()
        return model.logits(hidden).argmax(-1)

    token = forward(ids)
    read = time.perf_counter()
    peak = peak_bytes()
    for _ in range(STEPS):
        token = forward(token)
    return {"prefill": read - start, "bytes": peak - before, "decode": (time.perf_counter() - read) / STEPS}


def measure(layers: str, tokens: int, runs: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", layers, str(tokens)]
    found = [
        json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout) for _ in range(runs)
    ]
    middle = {name: median(run[name] for run in found) for name in found[0]}
    return {
        "layers": layers,
        "tokens": tokens,
        "prefill_ms_per_token": 1e3 * middle["prefill"] / tokens,
        "peak_kib_per_token": middle["bytes"] / 1024 / tokens,
        "decode_ms_per_token": 1e3 * middle["decode"],
    }


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Cost per token over the length of the prompt, one panel a measure, one line for each set of layers."""
    import matplotlib.pyplot as plt

    measures = {
        "prefill_ms_per_token": "prefill, ms a token",
        "peak_kib_per_token": "peak memory, KiB a token",
        "decode_ms_per_token": "decode, ms a token",
    }
    figure, panels = plt.subplots(1, len(measures), figsize=(12, 3.6), layout="constrained")
    for panel, (name, title) in zip(panels, measures.items(), strict=True):
        for layers in LAYERS:
            points = [(row["tokens"], row[name]) for row in rows if row["layers"] == layers]
            panel.plot(*zip(*points, strict=True), marker="o", label=layers)
        panel.set(title=title, xlabel="tokens of the prompt", ylim=(0, None))
        panel.set_xscale("log", base=2)
    panels[0].legend()
    figure.savefig(file, dpi=90)


def main() -> None:
    parser = options(__doc__, "scale", runs=1)
    parser.add_argument("--tokens", default=LENGTHS)
    parser.add_argument("--plot", type=Path, default=PLOT)
    chosen = parser.parse_args()
    lengths = [int(tokens) for tokens in chosen.tokens.split(",")]
    rows = [measure(layers, tokens, chosen.runs) for layers in LAYERS for tokens in lengths]
    finish(chosen, rows)
    if importlib.util.find_spec("matplotlib"):
        draw(rows, chosen.plot)
    else:
        print("matplotlib is not installed: nothing was drawn; `make bench` installs it")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one_run(sys.argv[2], int(sys.argv[3]))))
    else:
        main()
