"""The command line, the table and the JSON file that the speed benchmarks have in common."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import described, machine

RESULTS = Path(__file__).parent / "results"


def options(description: str | None, name: str, runs: int = 5) -> argparse.ArgumentParser:
    """--runs and --out; scripts add their own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=runs, help=f"alternated runs of each, {runs} if not given")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json", help="JSON file to write")
    return parser


def write(out: Path, **numbers: Any) -> None:
    """One JSON file: the machine, and what was measured on it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"machine": machine(), **numbers}, indent=1) + "\n")


def finish(chosen: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows to --out, and show them as a table under a line that names the machine."""
    write(chosen.out, runs=chosen.runs, rows=rows)
    cells = [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in row.values()] for row in rows]
    heads = [name.replace("_", " ") for name in rows[0]]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    print(described())
    for line in (heads, *cells):
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
