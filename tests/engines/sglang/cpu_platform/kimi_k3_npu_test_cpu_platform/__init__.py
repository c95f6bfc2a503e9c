"""An SGLang platform for tests: every operator in plain torch on the CPU, no sgl_kernel and no triton launch."""


def activate() -> str:
    """Name the platform class; SGLang imports it when it settles on this platform."""
    return "kimi_k3_npu_test_cpu_platform.platform.TorchCpuPlatform"
