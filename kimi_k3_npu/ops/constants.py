"""Small tensors that are the same in every layer and step, made once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

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
        if key in made:
            return made[key]
        tensor = build(*arguments, **options)
        if type(tensor) is Tensor:  # a fake tensor belongs to the mode it was made in
            if len(made) == KEPT:
                del made[next(iter(made))]
            made[key] = tensor
        return tensor

    return get
