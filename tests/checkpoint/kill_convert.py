"""Kill conversions at many points and see that going on gives the same bytes. Run by test_convert.py as a process.

usage: kill_convert.py SOURCE FOLDER FORM SEED

A child for every run is forked from here, where nothing but imports has happened. Prints a JSON object.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kimi_k3_npu.checkpoint import convert as conversion

#: What a conversion asks of the file system, in places where being stopped could matter.
CALLS = ("pwrite", "fsync", "replace", "rename", "unlink", "rmdir", "mkdir")


def in_child(run: Callable[[], object]) -> int:
    """The process id of a child that does `run`, and ends with 0 if it comes to its end."""
    if child := os.fork():
        return child
    try:
        run()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def ended(child: int) -> bool:
    """Whether the child came to its end, and was not killed."""
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return False
    assert os.WEXITSTATUS(status) == 0, "the conversion failed; see the traceback above"
    return True


def watched(run: Callable[[], object], log: Path, die_at: int | None = None) -> Callable[[], object]:
    """`run`, that writes to `log` how many of CALLS it made, or kills itself just before that of number `die_at`."""

    def counted() -> None:
        calls = 0

        def count(real: Callable[..., object]) -> Callable[..., object]:
            def counting(*arguments: object, **options: object) -> object:
                nonlocal calls
                if calls == die_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                calls += 1
                return real(*arguments, **options)

            return counting

        for name in CALLS:
            setattr(os, name, count(getattr(os, name)))
        run()
        log.write_text(str(calls))

    return counted


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def main(source: str, folder: Path, form: conversion.ConvertTo, seed: int) -> None:
    out = folder / "out"

    def run() -> object:
        return conversion.convert(source, out, form, jobs=2)

    start = time.perf_counter()
    assert ended(in_child(watched(run, folder / "calls")))
    seconds = time.perf_counter() - start
    wanted = contents(out)
    calls = int((folder / "calls").read_text())
    found: dict[str, Any] = {"calls": calls, "killed": 0, "different": []}

    def check(what: str) -> None:
        if contents(out) != wanted or [file.name for file in out.iterdir() if file.is_dir()]:
            found["different"].append(what)
        shutil.rmtree(out)

    shutil.rmtree(out)
    chance = random.Random(seed)
    middle = chance.sample(range(6, calls - 16), 4)  # tensor after tensor
    for call in (*range(6), *middle, *range(calls - 14, calls)):
        killed = not ended(in_child(watched(run, folder / "calls", call)))
        assert killed or abs(call - calls) < 8, "threads may leave a call or two more or less"
        found["killed"] += killed
        assert ended(in_child(run))
        check(f"killed before call {call}")

    for round in range(2):
        kills = 0
        while True:
            child = in_child(run)
            time.sleep(chance.uniform(0, seconds))
            if kills < 6:
                os.kill(child, signal.SIGKILL)
            if ended(child):
                break
            kills += 1
        found["killed"] += kills
        check(f"round {round}, killed {kills} times")
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))  # type: ignore[arg-type]
