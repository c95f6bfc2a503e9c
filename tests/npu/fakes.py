"""Fake NPU tensors: everything that torch_npu can say about a call without a device, which is all but the numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

from kimi_k3_npu.ops.device import Device, assume

aten = torch.ops.aten

# torch_npu ships no Meta function for this one.
_SHAPES = torch.library.Library("npu", "IMPL")
_SHAPES.impl(
    "npu_convert_weight_to_int4pack",
    lambda weight, inner_k_tiles=0: weight.new_empty(weight.shape[0], weight.shape[1] // 8),
    "Meta",
)


class WithoutDevice(TorchFunctionMode):
    """Python's indexing, and constants of one element, set the current device before they ask for an operator."""

    def __torch_function__(
        self, function: Callable, types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is Tensor.__getitem__:
            return _get(*args)
        if function is Tensor.__setitem__:
            return aten.copy_.default(_get(*args[:2]), args[2])
        if function is torch.tensor and kwargs:
            return torch.empty(np.shape(args[0]), **{"dtype": torch.int64} | kwargs)  # all of ours are of integers
        return function(*args, **(kwargs or {}))


@contextmanager
def fake_npu(device: Device) -> Iterator[Callable[..., Tensor]]:
    """Run on fake tensors of `device`; gives a function that makes one: `empty(3, 4, dtype=torch.bfloat16)`."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="npu")

    with FakeTensorMode(), assume(device), WithoutDevice():
        yield empty


def _get(tensor: Tensor, index: Any) -> Tensor:
    index = index if isinstance(index, tuple) else (index,)
    at = next((i for i, part in enumerate(index) if part is Ellipsis), None)
    if at is not None:
        given = sum(part is not None for part in index) - 1
        index = (*index[:at], *(slice(None),) * (tensor.dim() - given), *index[at + 1 :])
    dim = 0
    for part in index:
        if part is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(part, slice):
            tensor = aten.slice.Tensor(tensor, dim, part.start, part.stop, part.step or 1)
        elif isinstance(part, Tensor):
            tensor = aten.index.Tensor(tensor, [*[None] * dim, part])
        else:
            tensor = aten.select.int(tensor, dim, part)
            continue
        dim += 1
    return tensor
