"""Start ranks: one process each, gloo between them, all cases of a world in the same processes; which cases to run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from kimi_k3_npu.config import MXFP4_GROUP, KimiK3Config
from kimi_k3_npu.errors import LayoutError
from kimi_k3_npu.parallel.layout import ParallelLayout
from tests.patience import PATIENCE

ORACLES = Path(__file__).parents[1] / "oracle"
#: The oracles that every layout is checked on. The heads of k3-deep let no more than 2 ranks share attention.
CHECKED = ("k3", "k3-deep", "k3-mxfp4", "k3-router")
WORKER = Path(__file__).with_name("worker.py")

Case = dict[str, Any]


def launch(world: int, cases: Sequence[Case], folder: Path, *, emulate_npu: bool = False) -> list[list]:
    """Run the cases in order on `world` processes; of each case, what every rank returned.

    The first rank that fails ends the others, and its error is raised. So is a hang.
    """
    (folder / "cases.json").write_text(json.dumps(cases))
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, WORKER, str(world), folder, *["--emulate-npu"] * emulate_npu]
    ranks = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        _, errors = ranks.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired as hang:
        os.killpg(ranks.pid, signal.SIGKILL)
        ranks.communicate()
        logs = [log_of(folder, rank).read_text() for rank in range(world)]
        raise AssertionError("\n".join([f"{world} ranks hung; what each said:", *logs])) from hang
    if ranks.returncode:
        raise AssertionError(errors)
    return json.loads((folder / "results.json").read_text())


def log_of(folder: Path, rank: int) -> Path:
    """What a rank printed."""
    return folder / f"rank{rank}.log"


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


def score_cases(world: int, dispatches: Sequence[str] = ("gather", "alltoall")) -> list[Case]:
    """Every legal layout over `world` ranks on every oracle that is checked."""
    return [
        {"what": "score", "oracle": oracle, "layout": layout}
        for oracle in CHECKED
        for layout in legal_layouts(world, oracle, dispatches, details=oracle == "k3")
    ]


def sample(cases: Sequence[Case]) -> list[Case]:
    """Few of the cases, always the same, in which each two values of options, and each of an option with each oracle,
    still meet."""
    left = {pair for case in cases for pair in _met(case)}
    chosen = []
    while left:
        best = max(cases, key=lambda case: len(left & _met(case)))
        chosen.append(best)
        left -= _met(best)
    return chosen


def _met(case: Case) -> set[tuple]:
    """Any two of the oracle and the values of a layout's options."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = asdict(ParallelLayout.parse(case["layout"]))
    return set(combinations([("oracle", case["oracle"]), *options.items()], 2))


Take = Callable[[Sequence[Case]], Sequence[Case]]
#: For a test with the argument `take`: a sample, and in `make test-full` also all of the cases.
SAMPLE_OR_ALL = pytest.mark.parametrize(
    "take", [pytest.param(sample, id="sample"), pytest.param(list, marks=pytest.mark.full, id="all")]
)
