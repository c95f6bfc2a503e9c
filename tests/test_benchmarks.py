"""The speed benchmarks run, at their smallest; both sides of a comparison must agree, which the scripts check."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SMALLEST = {
    "prefill": (["--tokens", "65", "--threads", "1"], 4, "ratio"),
    "decode": (["--batches", "2", "--prompts", "16", "--threads", "1", "--eager"], 2, "ratio"),
    "scale": (["--tokens", "1024", "--plot", "unused.png"], 2, "peak_kib_per_token"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_script(name: str, tmp_path: Path) -> None:
    options, rows, measure = SMALLEST[name]
    if name != "scale" and not hasattr(transformers, "KimiLinearConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no KimiLinear to compare with")
    out = tmp_path / "out.json"
    script = [sys.executable, BENCHMARKS / f"{name}.py", *options, "--runs", "1", "--out", out]
    done = subprocess.run(script, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert len(found["rows"]) == rows
    assert all(row[measure] > 0 for row in found["rows"])
    assert found["machine"]["processor"] in done.stdout
