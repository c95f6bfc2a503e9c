"""CPU kernels for real torch_npu operators, which compute what those compute and refuse what their documents refuse.

`install()` registers them on the schemas of the imported torch_npu, so code that calls `torch.ops.npu.*` runs
unchanged on CPU tensors, and a wrong dispatch raises RuntimeError instead of passing a test. What an operator leaves
undefined (rows past the last group, an output that was not asked for) is filled with NaN or the worst integer, so that
reading it shows.

    install()
    with assume(Device("a3", parse_cann("9.1"))), lifted("npu_dynamic_quant", "dtype") as lifts:
        ...
    assert calls["npu_dynamic_quant"]; print(lifts)
"""

from __future__ import annotations

from tests.npu.emulation import attention, experts, matmul, norm, quant, routing, sgl, weights
from tests.npu.emulation.core import LIFTABLE, calls, fresh, install, lifted
from tests.npu.emulation.sgl import with_sgl_kernel_npu

__all__ = [
    "LIFTABLE",
    "attention",
    "calls",
    "experts",
    "fresh",
    "install",
    "lifted",
    "matmul",
    "norm",
    "quant",
    "routing",
    "sgl",
    "weights",
    "with_sgl_kernel_npu",
]
