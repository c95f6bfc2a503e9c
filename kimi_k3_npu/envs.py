"""Every environment variable of this package: its name, what it does, and the only code that reads it.

They are for a running engine, where no argument reaches us; where there is an argument, it wins. An empty value counts
as unset.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping

from kimi_k3_npu.errors import LaunchError

PREFIX = "KIMI_K3_NPU_"
V_UP = "KIMI_K3_NPU_V_UP"
SOC = "KIMI_K3_NPU_SOC"
CANN = "KIMI_K3_NPU_CANN"
SGLANG_EXPERT_DISPATCH = "KIMI_K3_NPU_SGLANG_EXPERT_DISPATCH"
SGLANG_EXPERT_WEIGHTS = "KIMI_K3_NPU_SGLANG_EXPERT_WEIGHTS"

#: Name -> what it does.
VARIABLES: dict[str, str] = {
    V_UP: "Kernel of the v-up batched matmul, instead of the first that can take the shape; an error if it cannot.",
    SOC: "NPU generation (a2, a3, a5, or a chip name such as Ascend910B3), instead of what torch_npu reports.",
    CANN: "CANN version (such as 9.1), instead of what torch_npu reports; CANN before 8.1.RC1 reports none.",
    SGLANG_EXPERT_DISPATCH: (
        "What carries tokens to experts under SGLang's --moe-a2a-backend deepep: deepep (SGLang's DeepEP dispatcher, "
        "the default on NPUs) or own (an all-to-all over SGLang's expert-parallel group, the default elsewhere)."
    ),
    SGLANG_EXPERT_WEIGHTS: (
        "How experts stay in memory under SGLang: auto (as they are stored, the default), packed (the same, and an "
        "error for plain ones), bf16 (expanded once), or int4x2 (MXFP4 as pairs of int4)."
    ),
}


def text(name: str) -> str | None:
    """The value of the variable `name`, None if it is unset or empty. Raises KeyError for a name not in VARIABLES."""
    if name not in VARIABLES:
        raise KeyError(name)
    return os.environ.get(name) or None


def one_of(name: str, allowed: Iterable[str]) -> str | None:
    """The value of the variable `name`, which must be one of `allowed`; None if it is unset.

    Raises:
        LaunchError: The value is none of them.
    """
    value = text(name)
    allowed = list(allowed)
    if value is not None and value not in allowed:
        raise LaunchError(f"{name}={value!r} is not a choice; choices: {', '.join(allowed)}{_near(value, allowed)}")
    return value


def check() -> None:
    """Refuse variables that start with KIMI_K3_NPU_ and are none of ours: a misspelt one would be ignored in silence.

    Raises:
        LaunchError: Names every unknown variable, with near matches.
    """
    unknown = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in VARIABLES)
    if unknown:
        lines = [f"unknown environment variable {name}{_near(name, VARIABLES)}" for name in unknown]
        raise LaunchError("\n".join([*lines, f"known: {', '.join(VARIABLES)}"]))


def hccl_buffer_megabytes() -> int:
    """CANN's HCCL_BUFFSIZE: megabytes of a communicator's buffer; 200 where it is not set.

    Raises:
        LaunchError: It is not a number.
    """
    value = os.environ.get("HCCL_BUFFSIZE") or "200"
    if not value.isdecimal():
        raise LaunchError(f"HCCL_BUFFSIZE={value!r} is not a number of megabytes")
    return int(value)


def server_key() -> str | None:
    """OPENAI_API_KEY: what clients of OpenAI's protocol send to a server to say who they are."""
    return os.environ.get("OPENAI_API_KEY") or None


def cxx_compiler() -> str:
    """CXX: the C++ compiler that torch.compile will call, g++ where it is not set."""
    return os.environ.get("CXX") or "g++"


def former() -> Mapping[str, str]:
    """The environment, for names that others had before this package: `ParallelLayout.with_former_variables`."""
    return os.environ


def _near(word: str, words: Iterable[str]) -> str:
    matches = difflib.get_close_matches(word, list(words), n=2)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""
