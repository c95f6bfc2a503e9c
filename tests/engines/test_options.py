"""The tables of options that a launch is refused for: data that needs no engine."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from kimi_k3_npu.engines.options import Option, check_all, choice
from kimi_k3_npu.engines.sglang import attention, options, symbols
from kimi_k3_npu.errors import LaunchError


def test_a_table_needs_neither_an_engine_nor_torch() -> None:
    code = "import kimi_k3_npu.engines.sglang.options, sys; sys.exit(bool({'torch', 'sglang'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_value_is_taken_or_refused_with_a_way_out() -> None:
    size, place, variable = Option("--size", (1, None)), choice("--place", ("here", "there")), Option("MODE", (False,))
    check_all((size, place), {size: None, place: "there"}.get)
    assert (size.problem(1), size.problem(2)) == (None, "--size 2 is not implemented by this model")
    with pytest.raises(LaunchError, match=r"^--size 2 is not implemented by this model; leave it out$"):
        check_all((place, size), {size: 2, place: "here"}.get)
    with pytest.raises(LaunchError, match=r"^--place away is not implemented by this model; choices: here, there$"):
        place.check("away")
    assert variable.problem(True) == "MODE=True is not implemented by this model"


def test_every_option_of_sglang_is_one_row() -> None:
    names = [option.name for option in options.OPTIONS]
    assert len(names) == len(set(names))
    assert {"--load-format", "--attention-backend", "--quantization", "SGLANG_NPU_USE_MLAPO"} <= set(names)
    assert set(options.ATTENTION_BACKEND.taken) == set(attention.FORMS)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        (options.LOAD_FORMAT, "layered", "--load-format layered is not implemented by this model, which reads the "
         "slices that a rank needs from safetensors files; choices: auto, safetensors, dummy"),
        (options.QUANTIZATION, "fp8", "--quantization fp8 is not applied by kimi_k3_npu: it serves a checkpoint in the "
         "format it is stored in; leave the option out"),
        (options.MOE_A2A_BACKEND, "mooncake", "--moe-a2a-backend mooncake is not implemented here; choices: none, "
         "deepep"),
        (options.ATTENTION_BACKEND, "triton", "--attention-backend triton is not implemented by this model; choices: "
         "torch_native, ascend"),
        (options.MLAPO, True, "SGLANG_NPU_USE_MLAPO=True keeps SGLang from writing the MLA cache of this model; unset "
         "it"),
    ],
    ids=lambda case: getattr(case, "name", ""),
)  # fmt: skip
def test_messages(option: Option, value: object, message: str) -> None:
    with pytest.raises(LaunchError) as refusal:
        option.check(value)
    assert str(refusal.value) == message


def test_prefill_and_decode_on_different_backends_are_refused() -> None:
    with pytest.raises(LaunchError, match="--attention-backend ascend for prefill and torch_native for decode is not"):
        attention._form("ascend", "torch_native")


def test_values_come_from_the_running_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the accessor and the attributes that a row names; of an enumeration, its value."""
    backend = SimpleNamespace(value="deepep")
    monkeypatch.setitem(
        vars(symbols), "get_exec", lambda: SimpleNamespace(moe=SimpleNamespace(moe_a2a_backend=backend))
    )
    assert options.value_of(options.MOE_A2A_BACKEND) == "deepep"
