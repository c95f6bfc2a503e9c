"""The kernels of sgl_kernel_npu that are used: which the installed version has, and finding one to launch it.

Their names differ from version to version, so a kernel is a candidate only where its name is there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from kimi_k3_npu.errors import LaunchError

PACKAGE = "sgl_kernel_npu"
_OPERATORS = "torch.ops.npu"

# Functions by their path in the package, and operators that importing it registers.
SITU_AND_MUL = "activation.situ.situ_and_mul"
MIX_FUSED = "kimi_k3.attn_residual.mix_fused"
KDA_GATE = "fla.kda_gate.fused_kda_gate_npu"
KDA_CHUNK = f"{_OPERATORS}.chunk_kda_fwd"
BATCH_MATMUL_TRANSPOSE = f"{_OPERATORS}.batch_matmul_transpose"
USED = (SITU_AND_MUL, MIX_FUSED, KDA_GATE, KDA_CHUNK, BATCH_MATMUL_TRANSPOSE)


def kernel(symbol: str) -> Callable[..., Any]:
    """The kernel of that name. Raises LaunchError if the installed version has none."""
    try:
        return _find(symbol)
    except (ImportError, AttributeError) as error:
        raise LaunchError(
            f"the installed {PACKAGE} has no usable {symbol} ({error}); install a version made for Kimi-K3, or remove "
            "it: without it, basic operators do the same"
        ) from error


def missing() -> dict[str, str]:
    """The kernels that the installed version lacks, each with why it cannot be had. Imports the package."""
    reasons: dict[str, str] = {}
    for symbol in USED:
        try:
            _find(symbol)
        except Exception as error:  # whatever an import of somebody else's code may raise
            reasons[symbol] = f"{type(error).__name__}: {error}"
    return reasons


def _find(symbol: str) -> Callable[..., Any]:
    module, _, name = symbol.rpartition(".")
    importlib.import_module(PACKAGE)
    return getattr(torch.ops.npu if module == _OPERATORS else importlib.import_module(f"{PACKAGE}.{module}"), name)
