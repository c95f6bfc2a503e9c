from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Out of tree, so that SGLang takes neither its CUDA imports nor sgl_kernel's CPU ones."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities(supports_triton=False)

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"  # fused operators then run their forward_native

    def support_mamba_cache_extra_buffer(self) -> bool:
        return True  # the plugin's backend for KDA takes the snapshots

    def init_backend(self) -> None:
        from kimi_k3_npu_test_cpu_platform import shims

        shims.install()
