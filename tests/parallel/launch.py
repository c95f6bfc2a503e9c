"""Start ranks: one process each, gloo between them, all cases of a world in the same processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kimi_k3_npu.config import MXFP4_GROUP, KimiK3Config
from kimi_k3_npu.errors import LayoutError
from kimi_k3_npu.parallel.layout import ParallelLayout

ORACLES = Path(__file__).parents[1] / "oracle"
#: The oracles that every layout is checked on. The heads of k3-deep let no more than 2 ranks share attention.
CHECKED = ("k3", "k3-deep", "k3-mxfp4", "k3-router")
WORKER = Path(__file__).with_name("worker.py")

Case = dict[str, Any]


def launch(world: int, cases: Sequence[Case], folder: Path, *, timeout: float, emulate_npu: bool = False) -> list[list]:
    """Run the cases in order on `world` processes; of each case, what every rank returned.

    The first rank that fails ends the others, and its error is raised. So does a hang, after `timeout` seconds.
    """
    (folder / "cases.json").write_text(json.dumps(cases))
    files = [str(folder / name) for name in ("rendezvous", "cases.json", "results.json")]
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    options = ["--emulate-npu"] * emulate_npu
    logs = [(folder / f"rank{rank}.log").open("w+") for rank in range(world)]
    ranks = [
        subprocess.Popen(
            [sys.executable, WORKER, str(rank), str(world), *files, *options], env=environment, stdout=log, stderr=log
        )
        for rank, log in enumerate(logs)
    ]
    try:
        failed = _wait(ranks, time.monotonic() + timeout)
    finally:
        for process, log in zip(ranks, logs, strict=True):
            process.kill()
            process.wait()
            log.seek(0)
        texts = [log.read() for log in logs]
        for log in logs:
            log.close()
    if failed is not None:
        raise AssertionError(f"rank {failed} of {world} failed or hung:\n{texts[failed]}")
    return json.loads((folder / "results.json").read_text())


def _wait(ranks: Sequence[subprocess.Popen], deadline: float) -> int | None:
    """The first rank that fails, or that is still running at the deadline; None when all end well."""
    while any(rank.poll() is None for rank in ranks):
        for i, rank in enumerate(ranks):
            if rank.poll() or (rank.returncode is None and time.monotonic() > deadline):
                return i
        time.sleep(0.05)
    return next((i for i, rank in enumerate(ranks) if rank.returncode), None)


def legal_layouts(
    tp: int, oracle: str, dispatches: Sequence[str] = ("gather", "alltoall"), *, details: bool = False
) -> list[str]:
    """The layouts over `tp` ranks that the oracle's sizes allow, as text.

    Every combination of replicas, dispatch and the two attention-TP options; with `details` also, once for each number
    of replicas, what does not depend on the options: ep between 1 and tp, a subgroup for the shared experts, and the
    vocabulary split within replicas.
    """
    config = KimiK3Config.from_pretrained(ORACLES / oracle)
    group = MXFP4_GROUP if config.quantization == "mxfp4" else 1
    found = []
    for text in _combinations(tp, dispatches, details):
        try:
            layout = ParallelLayout.parse(text)
            layout.check(config.text, expert_group=group)
        except LayoutError:
            continue
        found.append(str(layout))
    return list(dict.fromkeys(found))


def _combinations(tp: int, dispatches: Sequence[str], details: bool) -> Iterator[str]:
    for dp in (dp for dp in (1, 2, 4) if tp % dp == 0):
        attn_tp = tp // dp
        for dispatch in dispatches:
            base = f"tp={tp},dp={dp},dispatch={dispatch}"
            main = [f"{base},ep={ep}" for ep in (1, tp)] if dispatch == "gather" else [base]
            if dispatch != "gather" and attn_tp > 1:
                main.append(f"{base},shared=attn_tp")
            yield from main
            if dp > 1:
                yield from (f"{text},dense=attn_tp" for text in main)
            if details:
                yield f"{base},ep=2" if dispatch == "gather" else f"{base},shared=2"
                if dp > 1:
                    yield f"{main[-1]},lm_head=dp"
