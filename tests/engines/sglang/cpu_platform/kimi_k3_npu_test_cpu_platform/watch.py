"""Watches the decode passes of the model for what a captured graph could not replay. Asked for by an environment
variable that names the file to report to.
"""

import json
import os
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

VARIABLE = "TEST_WATCH_DECODE"

#: Operators that hand a tensor's values to Python (also behind `if tensor:`), or whose result's shape depends on them.
FORBIDDEN = {
    "aten::_local_scalar_dense",
    "aten::bincount",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::nonzero_numpy",
    "aten::repeat_interleave.Tensor",
    "aten::unique_consecutive",
    "aten::unique_dim",
    "aten::_unique",
    "aten::_unique2",
    "aten::allclose",
}


#: Methods that read a CPU tensor's memory without any operator.
READERS = ("tolist", "numpy", "__array__")


class Watch(TorchDispatchMode):
    """`found` has what must not be in a graph, `count` the operators seen."""

    def __init__(self):
        super().__init__()
        self.found, self.count = set(), 0

    def __enter__(self):
        self._readers = {name: getattr(torch.Tensor, name) for name in READERS}
        for name, method in self._readers.items():
            setattr(torch.Tensor, name, self._reporting(name, method))
        return super().__enter__()

    def __exit__(self, *error):
        for name, method in self._readers.items():
            setattr(torch.Tensor, name, method)
        return super().__exit__(*error)

    def _reporting(self, name, method):
        def read(tensor, *args, **kwargs):
            self.found.add(f"Tensor.{name}")
            return method(tensor, *args, **kwargs)

        return read

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        name = func._schema.name
        full = f"{name}.{func._overloadname}" if func._overloadname != "default" else name
        if name in FORBIDDEN or full in FORBIDDEN:
            self.found.add(full)
        elif name in ("aten::index", "aten::index_put", "aten::index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        ):
            self.found.add(f"{name} with a mask")
        return func(*args, **(kwargs or {}))


def install() -> None:
    path = os.environ.get(VARIABLE)
    if not path:
        return
    from kimi_k3_npu.engines.sglang.model import KimiK3ForSGLang
    from kimi_k3_npu.formats import PLAIN

    type(PLAIN).product = staticmethod(static_experts)
    forward = KimiK3ForSGLang.forward
    report = {"passes": 0, "operators": 0, "found": []}

    def watched(self, input_ids, positions, forward_batch, *args, **kwargs):
        if not forward_batch.forward_mode.is_decode():
            return forward(self, input_ids, positions, forward_batch, *args, **kwargs)
        # The engine prunes hidden states to rows and samples outside of the graph: only the network is watched.
        network, watch = self.network, Watch()
        run = network.run_layers

        def run_layers(*args, **kwargs):
            with watch:
                return run(*args, **kwargs)

        network.run_layers = run_layers
        try:
            return forward(self, input_ids, positions, forward_batch, *args, **kwargs)
        finally:
            del network.run_layers
            report["passes"] += 1
            report["operators"] += watch.count
            report["found"] = sorted({*report["found"], *watch.found})
            Path(path).write_text(json.dumps(report))

    KimiK3ForSGLang.forward = watched


def static_experts(x, weights, ids, w13, w2, laid_out, first_expert, beta, linear_beta):
    """The routed experts with static shapes, as the NPU's grouped kernels have them: every expert on every row."""
    from kimi_k3_npu.ops.situ import gated_activation

    (w13,), (w2,) = w13, w2
    total = torch.zeros_like(x, dtype=torch.float32)
    for e in range(w13.shape[0]):
        share = (weights * (ids == first_expert + e)).sum(dim=-1, keepdim=True)
        total = total + share * (gated_activation(x @ w13[e].t(), beta, linear_beta) @ w2[e].t()).float()
    return total.to(x.dtype)
