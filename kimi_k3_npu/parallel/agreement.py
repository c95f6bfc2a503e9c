"""What ranks have to agree on before one of them goes on alone. A rank that differs is heard by all, none waits."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

import torch.distributed as dist

from kimi_k3_npu.errors import LaunchError

#: Ranks named one by one in a message.
NAMED = 16


def check_alike(what: str, settings: Mapping[str, Callable[[], object]]) -> None:
    """Every rank of torch.distributed's world calls this; on each, `settings` are asked for and compared.

    Raises:
        LaunchError: On every rank alike, if one has another value than the others or none that is valid: `what` needs
            them alike.
    """
    mine: dict[str, str] = {}
    for name, ask in settings.items():
        try:
            mine[name] = str(ask())
        except LaunchError as error:  # the others wait for this rank's answer
            mine[name] = f"not valid ({error})"
    everyone: list[tuple[str, dict[str, str]]] = [("", {})] * dist.get_world_size()
    dist.all_gather_object(everyone, (socket.gethostname(), mine))
    problems = []
    for name in settings:
        found: dict[str, list[str]] = {}
        for rank, (host, theirs) in enumerate(everyone):
            found.setdefault(theirs[name], []).append(f"{rank} ({host})")
        if len(found) > 1 or any(value.startswith("not valid") for value in found):
            problems.append(f"{name} is " + ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in found.items()))
    if problems:
        raise LaunchError(f"{what} needs the same on all ranks: {'; '.join(problems)}; set it alike on every node")


def problems_of_all(problem: str, group: dist.ProcessGroup | None) -> str:
    """The problems of all ranks of `group`, each once, for them to do the same about: "" where no rank has one.

    None is a rank by itself.
    """
    if group is None:
        return problem
    problems: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    return "; ".join(dict.fromkeys(problem for problem in problems if problem))


def _ranks(ranks: list[str]) -> str:
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks[:NAMED])}{more}"
