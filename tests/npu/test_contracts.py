"""Every NPU kernel at Kimi-K3's full sizes, on fake tensors, through the schemas and shape functions of torch_npu.

Nothing is computed. What shows: that the chosen kernel's calls fit torch_npu's schemas, that results have the
reference's shapes and dtypes on an NPU, and which kernel each size takes.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.overrides import TorchFunctionMode

from kimi_k3_npu import ops
from kimi_k3_npu.ops import experts, schemas, sgl
from kimi_k3_npu.ops.device import Device, current, parse_cann
from kimi_k3_npu.ops.mc2 import MC2, Communicator
from kimi_k3_npu.ops.op import CHOSEN, OPS, Kernel, npu_operators
from tests.npu.emulation import with_sgl_kernel_npu
from tests.npu.fakes import fake_npu

for module in pkgutil.iter_modules(ops.__path__):
    importlib.import_module(f"{ops.__name__}.{module.name}")

ATTN_TP = [1, 2, 4, 8, 16]
TOKENS = [0, 1, 16, 1024, 1025, 8192, 65536]

BF16, FP32, INT8, INT32, INT64, U8 = torch.bfloat16, torch.float32, torch.int8, torch.int32, torch.int64, torch.uint8

# H hidden, L latent and I inner width of the experts, E experts of which held = E / 64 are here and k of a token, d
# width of a KDA head, R latent and r shared width of MLA, B rows of the residual bank.
H, L, I, E, held, k = 7168, 3584, 3072, 896, 14, 16
heads, d, R, r, nope, value = 96, 128, 512, 64, 128, 128
B, betas = 8, (4.0, 25.0)


@dataclass(frozen=True)
class Size:
    """T tokens on a rank of `tp`, which hold h heads."""

    tp: int
    T: int

    @property
    def h(self) -> int:
        return heads // self.tp

    def query_lens(self) -> list[int]:
        """Two sequences if there are enough tokens, the second of them short."""
        return [self.T] if self.T < 1024 else [self.T - 40, 40]


Build = Callable[[Any, Size], tuple[tuple, list[tuple[tuple[int, ...], torch.dtype]]]]

#: From what makes a fake tensor and a size: arguments, and shapes and dtypes of the results.
CASES: dict[str, Build] = {}


def case(build: Build) -> Build:
    CASES[build.__name__] = build
    return build


def routed(empty: Any, s: Size) -> tuple:
    return empty(s.T, L), empty(s.T, k, dtype=FP32), empty(s.T, k, dtype=INT32)


@case
def rms_norm(empty, s):
    return (empty(s.T, H), empty(H), 1e-5), [((s.T, H), BF16)]


@case
def add_rms_norm(empty, s):
    return (empty(s.T, H), empty(s.T, H), empty(H), 1e-5), [((s.T, H), BF16)] * 2


@case
def situ_and_mul(empty, s):
    return (empty(s.T, 2 * 2 * I // s.tp), *betas), [((s.T, 2 * I // s.tp), BF16)]


@case
def mix_residuals(empty, s):
    return (empty(s.T, H), empty(s.T, B, H), empty(H, dtype=FP32), 1e-5), [((s.T, H), BF16)]


@case
def route(empty, s):
    logits, bias = empty(s.T, E, dtype=FP32), empty(E, dtype=FP32)
    return (logits, bias, k, 1, 1, True, 1.0, True), [((s.T, k), FP32), ((s.T, k), INT32)]


@case
def kda_gate(empty, s):
    arguments = empty(s.T, s.h, d), empty(s.h, dtype=FP32), empty(s.h, d, dtype=FP32), -5.0
    return arguments, [((s.T, s.h, d), FP32)]


@case
def kda_chunk(empty, s):
    q, k_, g = (empty(s.T, s.h, d, dtype=FP32) for _ in range(3))
    lens = s.query_lens()
    state = empty(len(lens), s.h, d, d, dtype=FP32)
    arguments = q, k_, empty(s.T, s.h, d), g, empty(s.T, s.h, dtype=FP32), state, lens
    return arguments, [((s.T, s.h, d), FP32), (tuple(state.shape), FP32)]


@case
def latent_attention(empty, s):
    lens = s.query_lens()
    capacity = -(-(max(lens) + 1000) // 128) * 128
    pools = empty(4, capacity, R), empty(4, capacity, r)
    queries = empty(s.T, s.h, R), empty(s.T, s.h, r)
    kv_lens = [n + 1000 for n in lens]
    return (*queries, *pools, [2, 0][: len(lens)], lens, kv_lens, 0.07), [((s.T, s.h, R), BF16)]


@case
def causal_attention(empty, s):
    lens = s.query_lens()
    kv_lens = [n + 1000 for n in lens]
    keys = sum(kv_lens)
    q, k_, v = empty(s.T, s.h, nope + r), empty(keys, s.h, nope + r), empty(keys, s.h, value)
    return (q, k_, v, lens, kv_lens, 0.07), [((s.T, s.h, value), BF16)]


@case
def q_absorb(empty, s):
    return (empty(s.T, s.h, nope), empty(s.h, nope, R)), [((s.T, s.h, R), BF16)]


@case
def v_up(empty, s):
    return (empty(s.T, s.h, R), empty(s.h, R, value)), [((s.T, s.h, value), BF16)]


@case
def moe_experts(empty, s):
    matrices = [empty(held, 2 * I, L)], [empty(held, L, I)]
    return (*routed(empty, s), *matrices, False, 3 * held, *betas), [((s.T, L), BF16)]


@case
def moe_experts_mxfp4(empty, s):
    w13 = [empty(held, 2 * I, L // 2, dtype=U8), empty(held, 2 * I, L // 32, dtype=U8)]
    w2 = [empty(held, L, I // 2, dtype=U8), empty(held, L, I // 32, dtype=U8)]
    return (*routed(empty, s), w13, w2, True, 3 * held, *betas), [((s.T, L), BF16)]


@case
def moe_experts_w4a8(empty, s):
    def matrix(N: int, K: int):
        return [empty(held, K, N // 8, dtype=INT32), empty(held, 1, N, dtype=INT64), empty(held, N, dtype=FP32)]

    return (*routed(empty, s), matrix(2 * I, L), matrix(L, I), True, 3 * held, *betas), [((s.T, L), BF16)]


@case
def moe_experts_int4_group(empty, s):
    def matrix(N: int, K: int):
        return [*(empty(held, K, N // 8, dtype=INT32) for _ in range(2)), empty(held, K // 32, N)]

    return (*routed(empty, s), matrix(2 * I, L), matrix(L, I), current().soc != "a5", 3 * held, *betas), [
        ((s.T, L), BF16)
    ]


@case
def dynamic_quant_int8(empty, s):
    return (empty(s.T, H),), [((s.T, H), INT8), ((s.T,), FP32)]


@case
def w8a8_linear(empty, s):
    outputs = 2 * 2 * I // s.tp
    weight, scale = empty(H, outputs, dtype=INT8).t(), empty(outputs, 1, dtype=FP32)
    return (empty(s.T, H), weight, scale, None), [((s.T, outputs), BF16)]


@case
def as_nz(empty, s):
    return (empty(held, L, I, dtype=INT8), False), [((held, L, I), INT8)]


#: The candidate of each kernel on an A3 and on an A5 with sgl_kernel_npu, for any number of tokens but 0.
CHOSEN_ON = {
    "rms_norm": ("npu_rms_norm", "npu_rms_norm"),
    "add_rms_norm": ("npu_add_rms_norm", "npu_add_rms_norm"),
    "situ_and_mul": ("sgl_situ_and_mul", "sgl_situ_and_mul"),
    "mix_residuals": ("sgl_mix_fused", "sgl_mix_fused"),
    "route": ("npu_moe_gating_top_k", "npu_moe_gating_top_k"),
    "kda_gate": ("sgl_kda_gate", "sgl_kda_gate"),
    "kda_chunk": ("sgl_chunk_kda_fwd", "sgl_chunk_kda_fwd"),
    "latent_attention": ("fia_v2_absorbed", "fia_v2_absorbed"),
    "causal_attention": ("fia_v2_expanded", "fia_v2_expanded"),
    "q_absorb": ("transpose_batchmatmul", "transpose_batchmatmul"),
    "v_up": ("transpose_batchmatmul", "transpose_batchmatmul"),
    "moe_experts": ("grouped_matmul", "grouped_matmul"),
    "moe_experts_mxfp4": ("composed", "grouped_matmul_mxfp4"),
    "moe_experts_w4a8": ("grouped_matmul_w4a8", "composed"),
    "moe_experts_int4_group": ("grouped_matmul_int4", "composed"),
    "dynamic_quant_int8": ("npu_dynamic_quant", "npu_dynamic_quant"),
    "w8a8_linear": ("npu_quant_matmul", "npu_quant_matmul"),
    "as_nz": ("npu_format_cast", "npu_format_cast"),
}
#: Without the package.
COMPOSED_WITHOUT_SGL = ("situ_and_mul", "mix_residuals", "kda_gate", "kda_chunk")
#: Which experts are hit decides what their compositions launch: no fake tensor can know.
DATA_DEPENDENT = [name for name in CASES if name.startswith("moe_experts")]


def test_every_kernel_has_a_case():
    assert set(CASES) == set(CHOSEN_ON) == set(npu_operators())


@pytest.fixture(autouse=True)
def nz_weights(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("KIMI_K3_NPU_V_UP", raising=False)
    monkeypatch.setattr(experts, "is_nz", lambda weight: True)  # a fake has no format


def check(name: str, size: Size, device: Device) -> str | None:
    """Run a kernel on fakes and check what it returns; the name of the candidate that ran, None if nothing had to."""
    CHOSEN.clear()
    try:
        with fake_npu(device) as empty:
            arguments, results = CASES[name](empty, size)
            out = OPS[name].npu(*arguments)
    except DataDependentOutputException:
        assert name in DATA_DEPENDENT
        assert CHOSEN[name, "composed"] == 1
        return "composed"
    out = (out,) if isinstance(out, torch.Tensor) else out
    assert [(tuple(x.shape), x.dtype, x.device.type) for x in out] == [(*result, "npu") for result in results]
    chosen = [kernel for op, kernel in CHOSEN if op == name]
    assert len(chosen) <= 1
    return chosen[0] if chosen else None


@pytest.mark.parametrize("attn_tp", ATTN_TP)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("soc", ["a3", "a5"])
def test_contract(soc: str, name: str, attn_tp: int):
    device = Device(soc, parse_cann("9.1"), frozenset({"sgl_kernel_npu"}))
    wanted = CHOSEN_ON[name][soc == "a5"]
    with with_sgl_kernel_npu():
        ran = {tokens: check(name, Size(attn_tp, tokens), device) for tokens in TOKENS}
    sized = name != "as_nz"  # which is of weights
    nothing = None if name in ("q_absorb", "v_up") else "composed"
    assert ran == {tokens: wanted if tokens or not sized else nothing for tokens in TOKENS}


@pytest.mark.parametrize("attn_tp", ATTN_TP)
@pytest.mark.parametrize("name", COMPOSED_WITHOUT_SGL)
def test_contract_without_sgl_kernel_npu(name: str, attn_tp: int):
    """Not the largest sizes: the composed delta rule takes a Python step a chunk of 64 tokens."""
    device = Device("a2", parse_cann("8.5"))
    assert {check(name, Size(attn_tp, tokens), device) for tokens in (0, 1, 1025)} == {"composed"}


@pytest.mark.parametrize("name", npu_operators())
def test_the_dispatcher_has_the_kernel_for_npu_tensors(name: str):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"kimi_k3::{name}", "PrivateUse1")


class Watched(TorchFunctionMode):
    """Notes the needs of every call of torch_npu's operators inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.needs: set[str] = set()

    def __torch_function__(
        self, function: Callable, types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        namespace, _, name = str(function).removesuffix(".default").rpartition(".")
        if namespace == "npu" and f"torch.ops.npu.{name}" not in sgl.USED:
            self.needs |= {name, *(f"{name}({option})" for option in kwargs or {})}
        return function(*args, **(kwargs or {}))


#: Those of every operator but the cast, which computes nothing, and but references, which run without torch_npu.
KERNELS = [
    (name, kernel)
    for name, op in npu_operators().items()
    for kernel in op.kernels
    if name != "as_nz" and kernel.launch is not op.reference
]


@pytest.mark.parametrize(("name", "kernel"), KERNELS, ids=lambda value: getattr(value, "name", None))
def test_a_kernel_needs_what_it_passes(name: str, kernel: Kernel):
    """No more and no less."""
    soc = "a5" if name == "moe_experts_mxfp4" else "a3"
    with with_sgl_kernel_npu(), fake_npu(Device(soc, parse_cann("9.1"), frozenset({"sgl_kernel_npu"}))) as empty:
        arguments, _ = CASES[name](empty, Size(16, 16))
        with Watched() as watched:
            kernel.launch(*arguments)
    assert watched.needs == kernel.needs


def test_mc2_needs_what_it_passes():
    """The A2's call has all that the A3's has."""
    with fake_npu(Device("a2", parse_cann("9.1"))) as empty:
        z, weights, ids = routed(empty, Size(16, 16))
        with Watched() as watched:
            MC2.launch(z, weights, ids, lambda x, *_: x, 16, Communicator("hccl", 63, 64, 384))
    assert watched.needs == MC2.needs


def test_torch_npu_has_all_that_kernels_need(monkeypatch: pytest.MonkeyPatch):
    assert list(schemas.missing()) == []
    monkeypatch.setattr(schemas, "CALLED", {"npu_rms_norm": {"input", "rounding"}, "npu_rms_norms": {"input"}})
    assert list(schemas.missing()) == ["npu_rms_norm(rounding)", "npu_rms_norms"]
