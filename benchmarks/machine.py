"""What a benchmark ran on, for its table and its JSON."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def machine() -> dict[str, str | int]:
    """The processor by its name, how many cores this process may use, the memory in GiB, and the version of torch."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "torch": torch.__version__,
    }


def described() -> str:
    """The same in a line."""
    found = machine()
    return f"{found['processor']}, {found['cores']} cores, {found['memory_gib']} GiB, torch {found['torch']}"
