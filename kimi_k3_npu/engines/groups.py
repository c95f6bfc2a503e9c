"""An engine's process groups as `Mesh.over` takes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist


def process_groups(coordinators: Iterable[Any]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """The device groups of SGLang's or vLLM's coordinators by the ranks in them; of two with the same, the first's."""
    found: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for coordinator in coordinators:
        found.setdefault(tuple(coordinator.ranks), coordinator.device_group)
    return found
