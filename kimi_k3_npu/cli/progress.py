"""Progress bars on stderr, for people: nothing is shown when stderr is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def bytes_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for as long as the block runs; call what it yields with the bytes done and the bytes in all."""
    with _bar(DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=min(done, total), total=total)


@contextmanager
def steps_bar(label: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar of `total` steps for as long as the block runs; call what it yields after each."""
    with _bar(MofNCompleteColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task(label, total=total)
        yield lambda: progress.advance(task)


def _bar(*columns: ProgressColumn) -> Progress:
    hidden = not sys.stderr.isatty()
    console = Console(stderr=True, quiet=hidden)  # rich 14.0 ends bars with an empty line, also those it does not show
    return Progress(
        TextColumn("{task.description}"), BarColumn(), *columns, console=console, transient=True, disable=hidden
    )
