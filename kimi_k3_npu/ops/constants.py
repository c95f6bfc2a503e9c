"""Small tensors that are the same in every layer and step, made once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import torch
from torch import Tensor

Key = ParamSpec("Key")

#: Tensors kept of each kind.
KEPT = 64


def constant(build: Callable[Key, Tensor]) -> Callable[Key, Tensor]:
    """Keep what `build` returned for the last KEPT argument tuples. Nobody may write to the tensors.

    A graph capture that is the first to ask for a tensor records its making and leaves it unset until the graph is
    replayed: run a step before capturing, as engines do to warm up.
    """
    made: dict[tuple, Tensor] = {}

    @functools.wraps(build)
    def get(*arguments: Key.args, **options: Key.kwargs) -> Tensor:
        key = (*arguments, *options.items())
        fake = type(torch.empty(0)) is not Tensor  # a fake tensor belongs to the mode it was made in
        if key in made and not fake:
            return made[key]
        with torch.inference_mode(False):  # it outlives the pass that asked for it, and training may be next
            tensor = build(*arguments, **options)
        if not fake:
            if len(made) == KEPT:
                del made[next(iter(made))]
            made[key] = tensor
        return tensor

    return get
