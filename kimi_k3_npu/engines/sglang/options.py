"""Options of SGLang of which some values are refused. Importing this needs no SGLang, only asking for values does."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

from kimi_k3_npu.engines import options
from kimi_k3_npu.engines.launch import IMPL
from kimi_k3_npu.engines.options import Option, choice
from kimi_k3_npu.engines.sglang import symbols as engine
from kimi_k3_npu.parallel.layout import Dispatch

#: Our dispatch for each `--moe-a2a-backend` that has one.
DISPATCH: dict[str, Dispatch] = {"none": "gather", "deepep": "alltoall"}

AttentionBackend = Literal["torch_native", "ascend"]

MOE_A2A_BACKEND = choice("--moe-a2a-backend", DISPATCH, at="exec.moe.moe_a2a_backend", why="is not implemented here")
LOAD_FORMAT = replace(options.LOAD_FORMAT, at="model.load_format")
#: SGLang lets prefill and decode differ; here one form of call serves both.
ATTENTION_BACKEND = choice("--attention-backend", get_args(AttentionBackend))
#: SGLang sets it for the stored formats that our loader reads.
QUANTIZATION = Option(
    "--quantization",
    (None, "compressed-tensors", "modelslim"),
    why=f"is not applied by {IMPL}: it serves a checkpoint in the format it is stored in",
    fix="leave the option out",
)
MLAPO = Option(
    "SGLANG_NPU_USE_MLAPO", (False,), why="keeps SGLang from writing the MLA cache of this model", fix="unset it"
)

#: Of parallelism and placement: `at` is what SGLang's runtime context has below `get_...()`.
PARALLEL = (
    MOE_A2A_BACKEND,
    Option("--attn-cp-size", (1,), "parallel.attn_cp_size"),
    Option("--dcp-size", (1,), "parallel.dcp_size"),
    Option("--moe-data-parallel-size", (1,), "parallel.moe_dp_size"),
    Option("--moe-dense-tp-size", (None,), "parallel.moe_dense_tp_size"),
    Option("--ep-num-redundant-experts", (0,), "exec.moe.ep_num_redundant_experts"),
    Option("--enable-eplb", (False,), "exec.moe.enable_eplb"),
    Option("--init-expert-location", ("trivial",), "exec.moe.init_expert_location"),
    Option("--enable-two-batch-overlap", (False,), "exec.overlap.enable_two_batch_overlap"),
    Option("--cpu-offload-gb", (0,), "exec.offload.cpu_offload_gb"),
    Option("--offload-group-size", (-1,), "exec.offload.offload_group_size"),
    Option("--enable-lora", (None, False), "lora.enable_lora"),
)

#: Every option of SGLang that a launch of ours may be refused for.
OPTIONS = (*PARALLEL, LOAD_FORMAT, ATTENTION_BACKEND, QUANTIZATION, MLAPO)


def value_of(option: Option) -> object:
    """What the running engine has for it."""
    section, *names = option.at.split(".")
    value = getattr(engine, f"get_{section}")()
    for name in names:
        value = getattr(value, name)
    return getattr(value, "value", value)
