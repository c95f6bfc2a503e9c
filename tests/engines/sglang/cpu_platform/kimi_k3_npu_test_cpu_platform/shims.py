"""What SGLang's own code needs to run on a CPU that it does not take for its CPU engine (that one wants sgl_kernel)."""

from importlib.util import find_spec

import torch


def install() -> None:
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.model_executor import forward_batch_info

    from kimi_k3_npu_test_cpu_platform import ascend_stand_in, watch

    # Data-parallel attention pads batches with sequences of this length.
    TorchNativeAttnBackend.get_cuda_graph_seq_len_fill_value = lambda self: 1
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1
    # It copies rows with a triton kernel, pins memory, and gathers by operators that have no CPU kernel.
    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    forward_batch_info._is_cpu = True
    torch.Tensor.pin_memory = lambda self, *device: self
    for name in ("reg_all_gather_into_tensor", "reg_reduce_scatter_tensor"):
        _run_on_cpu(parallel_state, name)
    if find_spec("deep_ep"):
        # Its dispatcher then talks to deep_ep as on Ascend; elsewhere it asks for CUDA.
        from sglang.srt.layers.moe.token_dispatcher import deepep

        deepep._is_npu = True
    ATTENTION_BACKENDS["ascend"] = ascend_stand_in.AscendStandIn
    watch.install()


def _run_on_cpu(parallel_state, name: str) -> None:
    method = name.removeprefix("reg")

    def run(output: torch.Tensor, input: torch.Tensor, group_name: str) -> None:
        getattr(parallel_state._groups[group_name](), method)(output, input)

    setattr(parallel_state, name, run)
