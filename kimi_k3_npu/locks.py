"""One writer for an output at a time: a lock that ends with the process that has it, however the process ends."""

from __future__ import annotations

import fcntl
import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kimi_k3_npu.errors import KimiK3Error

#: In a folder that is being written to; beside a file, with the file's name in front.
LOCK = ".kimi-k3-npu.lock"


@contextmanager
def writing_to(output: Path, what: str, error: type[KimiK3Error] = KimiK3Error) -> Iterator[None]:
    """Keep every other writer away from `output`: a folder that is there, or a file that may not be there yet.

    The system gives the lock back when its process ends, so that nothing is in the way after a kill; only an empty
    lock's file may be left. Devices and pipes are not locked: what is written to them mixes with nothing.

    Args:
        what: What this writer makes, such as "conversion"; another is refused with these words.

    Raises:
        KimiK3Error: Of type `error`: another writer has it; the message names that one and its process.
    """
    output = output.resolve()
    if output.exists() and not output.is_file() and not output.is_dir():
        yield
        return
    file = output / LOCK if output.is_dir() else output.with_name(f".{output.name}{LOCK}")
    while (lock := _try_lock(file, output, error)) is None:
        pass
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{what} is writing to it (process {os.getpid()} on {platform.node()})".encode(), 0)
        yield
    finally:
        try:
            file.unlink(missing_ok=True)
        finally:
            os.close(lock)


def _try_lock(file: Path, output: Path, error: type[KimiK3Error]) -> int | None:
    """The locked `file`, open. None if the writer before removed it meanwhile: then it keeps nobody away."""
    lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 1000, 0).decode(errors="replace") or "process is writing to it"
        os.close(lock)
        raise error(f"{output}: another {holder}; wait until it has ended, or write elsewhere") from None
    except OSError as problem:  # some network file systems have no locks
        warnings.warn(f"{output}: cannot be locked ({problem.strerror}); let nothing else write to it", stacklevel=4)
        return lock
    try:
        if os.path.samestat(os.fstat(lock), os.stat(file)):
            return lock
    except FileNotFoundError:
        pass
    os.close(lock)
    return None
