"""What the NPU kernels are tried on: inputs of a model's own sizes, and how far a kernel may be from the reference.

The self-test on a device and the tests of this package take their cases from here. A case is a function from `Sizes` to
the arguments of its operator, CPU tensors and plain values, the same ones in every call.

Letters as in the operators: T tokens, h heads of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kimi_k3_npu.config import TextConfig
from kimi_k3_npu.ops.experts_int4 import int4_layout, prepare_mxfp4_as_int4, prepare_w4a8, w4a8_bias
from kimi_k3_npu.ops.nz import as_nz
from kimi_k3_npu.ops.quant_linear import prepare_w8a8

Arguments = tuple[Any, ...]

#: Experts of a case: as few as a grouped product can have, to be quick.
EXPERTS, FIRST_EXPERT = 2, 3


@dataclass(frozen=True)
class Tolerance:
    """The largest error allowed, and what makes it that large."""

    error: float
    because: str


ROUNDED_ONCE = Tolerance(2**-7, "both sides compute in fp32 and round to 16 bits once: one unit in the last place")
ROUNDED_INSIDE = Tolerance(2**-6, "16-bit values are rounded at different places inside: two units in the last place")
ROUNDED_INPUTS = Tolerance(2**-6, "q, k and v are rounded to bfloat16 on the way in, and the result on the way out")
INT8_ROWS = Tolerance(2**-5, "rows are rounded to int8, each with its own scale, which the reference does not do")
INT8_ROWS_TWICE = Tolerance(2**-4, "rows are rounded to int8 before each of two products")
MXFP8_ROWS = Tolerance(2**-3, "rows are rounded to e4m3, whose last place is 2^-3, before each of two products")
ONE_STEP = Tolerance(2**-6, "a tie may be rounded to either of two neighbouring codes")
EXACT = Tolerance(0.0, "values are moved, not computed")
FP32 = Tolerance(1e-5, "fp32 throughout; sums in another order, another exp")
FP32_CHAINED = Tolerance(1e-4, "fp32 throughout; the state carries errors from chunk to chunk")


@dataclass(frozen=True)
class Sizes:
    """T tokens on one of `attn_tp` ranks of a model, in a dtype."""

    config: TextConfig
    T: int
    attn_tp: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def kda_heads(self) -> int:
        return self.config.kda_num_heads // self.attn_tp

    @property
    def heads(self) -> int:
        return self.config.num_attention_heads // self.attn_tp

    @cached_property
    def generator(self) -> torch.Generator:
        return torch.Generator()

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers."""
        return (torch.randn(shape, generator=self.generator) * scale).to(dtype or self.dtype)

    def fp32(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self.normal(*shape, scale=scale, dtype=torch.float32)

    def uniform(self, *shape: int, low: float, high: float) -> Tensor:
        """fp32 numbers between `low` and `high`."""
        return torch.rand(shape, generator=self.generator) * (high - low) + low

    def below(self, bound: int, *shape: int) -> Tensor:
        return torch.randint(bound, shape, generator=self.generator)

    def bytes(self, *shape: int) -> Tensor:
        return self.below(256, *shape).to(torch.uint8)

    def again(self) -> Sizes:
        """These sizes with their random numbers from the start."""
        self.generator.manual_seed(self.T)
        return self


@dataclass(frozen=True)
class Case:
    """One call of operator `op`.

    `kernels` has the tolerance of kernels that compute with less than the reference does. `prepare` does to arguments
    on their device what loading does to weights. `canonical` makes outputs comparable whose order or last bit means
    nothing.
    """

    op: str
    name: str
    build: Callable[[Sizes], Arguments]
    tolerance: Tolerance
    kernels: Mapping[str, Tolerance]
    prepare: Callable[..., Arguments]
    canonical: Callable[..., tuple[Tensor, ...]]

    def arguments(self, sizes: Sizes) -> Arguments:
        return self.build(sizes.again())

    def allowed(self, kernel: str) -> Tolerance:
        return self.kernels.get(kernel, self.tolerance)

    def error(self, got: Any, want: Any) -> float:
        """The largest difference of an output, as a share of the reference's largest magnitude.

        Infinite if a shape, a dtype or an integer is wrong, or anything is NaN.
        """
        pairs = zip(self._outputs(got), self._outputs(want), strict=True)
        return max(_error(g.cpu(), w.cpu()) for g, w in pairs)

    def _outputs(self, outputs: Any) -> tuple[Tensor, ...]:
        return self.canonical(*((outputs,) if isinstance(outputs, Tensor) else outputs))


def _error(got: Tensor, want: Tensor) -> float:
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    if not want.is_floating_point():
        return 0.0 if torch.equal(got, want) else float("inf")
    if not want.numel():
        return 0.0
    largest = want.double().abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    error = ((got.double() - want.double()).abs().max() / largest).item()
    return error if error == error else float("inf")


#: Every case, by operator.
CASES: dict[str, list[Case]] = {}


def as_they_are(*values: Any) -> tuple[Any, ...]:
    return values


def case(
    op: str,
    tolerance: Tolerance,
    *,
    kernels: Mapping[str, Tolerance] | None = None,
    prepare: Callable[..., Arguments] = as_they_are,
    canonical: Callable[..., tuple[Tensor, ...]] = as_they_are,
) -> Callable[[Callable[[Sizes], Arguments]], Callable[[Sizes], Arguments]]:
    """Make the decorated function a case of operator `op`."""

    def bind(build: Callable[[Sizes], Arguments]) -> Callable[[Sizes], Arguments]:
        made = Case(op, build.__name__, build, tolerance, kernels or {}, prepare, canonical)
        CASES.setdefault(op, []).append(made)
        return build

    return bind


@case("rms_norm", ROUNDED_ONCE)
def norm(s: Sizes) -> Arguments:
    return s.normal(s.T, s.config.hidden_size), s.normal(s.config.hidden_size), s.config.rms_norm_eps


@case("rms_norm", FP32)
def norm_of_heads(s: Sizes) -> Arguments:
    """KDA's output norm, in fp32."""
    d = s.config.kda_head_dim
    return s.fp32(s.T, s.kda_heads, d), s.fp32(d), s.config.rms_norm_eps


@case("add_rms_norm", ROUNDED_ONCE)
def add_and_norm(s: Sizes) -> Arguments:
    H = s.config.hidden_size
    return s.normal(s.T, H), s.normal(s.T, H, scale=3), s.normal(H), s.config.rms_norm_eps


@case("situ_and_mul", ROUNDED_ONCE)
def activation(s: Sizes) -> Arguments:
    """Inputs large enough to reach where tanh bends, for both betas."""
    width = s.config.num_shared_experts * s.config.moe_intermediate_size // s.attn_tp
    return s.normal(s.T, 2 * width, scale=8), *s.config.activation_betas


@case("mix_residuals", ROUNDED_ONCE)
def mixture_of_two(s: Sizes) -> Arguments:
    return mixture(s, 1)


@case("mix_residuals", ROUNDED_ONCE)
def mixture_of_all(s: Sizes) -> Arguments:
    return mixture(s, -(-s.config.num_hidden_layers // (s.config.attn_res_block_size or 1)))


def mixture(s: Sizes, rows: int) -> Arguments:
    H = s.config.hidden_size
    return s.normal(s.T, H), s.normal(s.T, rows, H), s.fp32(H, scale=H**-0.5), s.config.rms_norm_eps


def by_expert(weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    ids, order = ids.sort(dim=-1)
    return weights.gather(1, order), ids


@case("route", FP32, canonical=by_expert)
def routing(s: Sizes) -> Arguments:
    """Logits far enough apart that rounding cannot change who is among the best."""
    c = s.config
    ranks = torch.stack([torch.randperm(c.num_experts, generator=s.generator) for _ in range(s.T)])
    logits = 8 * (ranks / c.num_experts - 0.5)
    sigmoid = c.moe_router_activation_func == "sigmoid"
    bias = torch.zeros(c.num_experts)
    options = (c.num_expert_group, c.topk_group, c.moe_renormalize, c.routed_scaling_factor, sigmoid)
    return logits, bias, c.num_experts_per_token, *options


@case("kda_gate", FP32)
def decay(s: Sizes) -> Arguments:
    h, d = s.kda_heads, s.config.kda_head_dim
    return s.normal(s.T, h, d, scale=3), s.fp32(h), s.fp32(h, d), s.config.gate_lower_bound


@case("kda_chunk", FP32_CHAINED, kernels={"sgl_chunk_kda_fwd": ROUNDED_INPUTS})
def delta_rule_of_one(s: Sizes) -> Arguments:
    return delta_rule(s, [s.T])


@case("kda_chunk", FP32_CHAINED, kernels={"sgl_chunk_kda_fwd": ROUNDED_INPUTS})
def delta_rule_of_several(s: Sizes) -> Arguments:
    """Sequences that end inside a chunk, at its border and just past it."""
    return delta_rule(s, [s.T, 64, 65, 1])


def delta_rule(s: Sizes, lens: list[int]) -> Arguments:
    T, h, d = sum(lens), s.kda_heads, s.config.kda_head_dim
    q, k = (torch.nn.functional.normalize(s.fp32(T, h, d), dim=-1) for _ in range(2))
    g, beta = s.uniform(T, h, d, low=-5.0, high=0.0), s.uniform(T, h, low=0.0, high=1.0)
    return q * d**-0.5, k, s.normal(T, h, d), g, beta, s.fp32(len(lens), h, d, d, scale=0.1), lens


@case("latent_attention", ROUNDED_INSIDE)
def decode(s: Sizes) -> Arguments:
    """One token of each of T sequences, of every length that ends in another page or another place of it."""
    capacity = 1024 if s.T <= 64 else 128
    return latent_attention(s, [1] * s.T, [1 + i * 37 % capacity for i in range(s.T)], capacity)


@case("latent_attention", ROUNDED_INSIDE)
def prefill_of_latents(s: Sizes) -> Arguments:
    """A new sequence, and one that goes on after a cached prefix: more queries than one sequence may have at a time."""
    return latent_attention(s, [s.T, 40], [s.T, 300], -(-max(s.T, 300) // 128) * 128)


def latent_attention(s: Sizes, query_lens: list[int], kv_lens: list[int], capacity: int) -> Arguments:
    h, R, r = s.heads, s.config.kv_lora_rank, s.config.qk_rope_head_dim
    T, slots = sum(query_lens), len(query_lens)
    pools = s.normal(slots, capacity, R), s.normal(slots, capacity, r)
    order = list(reversed(range(slots)))
    return s.normal(T, h, R), s.normal(T, h, r), *pools, order, query_lens, kv_lens, s.config.qk_head_dim**-0.5


@case("causal_attention", ROUNDED_INSIDE)
def prefill(s: Sizes) -> Arguments:
    """A new sequence, and one that goes on after a cached prefix."""
    h, D, V = s.heads, s.config.qk_head_dim, s.config.v_head_dim
    query_lens, kv_lens = [s.T, 40], [s.T, 300]
    T, Tk = sum(query_lens), sum(kv_lens)
    return s.normal(T, h, D), s.normal(Tk, h, D), s.normal(Tk, h, V), query_lens, kv_lens, D**-0.5


@case("q_absorb", ROUNDED_ONCE)
def absorption(s: Sizes) -> Arguments:
    """The queries are a view, as in the model."""
    h, n, R = s.heads, s.config.qk_nope_head_dim, s.config.kv_lora_rank
    return s.normal(s.T, h, s.config.qk_head_dim)[..., :n], s.normal(h, n, R, scale=n**-0.5)


@case("v_up", ROUNDED_ONCE)
def value_up(s: Sizes) -> Arguments:
    h, R, V = s.heads, s.config.kv_lora_rank, s.config.v_head_dim
    return s.normal(s.T, h, R), s.normal(h, R, V, scale=R**-0.5)


def visits(s: Sizes) -> Arguments:
    """Rows, weights and ids of T tokens that visit k of 2k experts."""
    k = s.config.num_experts_per_token
    ids = torch.rand(s.T, 2 * k, generator=s.generator).argsort(dim=-1)[:, :k].to(torch.int32)
    return s.normal(s.T, s.config.expert_hidden_size), s.uniform(s.T, k, low=0.5 / k, high=1.5 / k), ids


def expert_shapes(s: Sizes) -> tuple[tuple[int, int], tuple[int, int]]:
    """Outputs and inputs of a w13 and of a w2."""
    width, inner = s.config.expert_hidden_size, s.config.moe_intermediate_size
    return (2 * inner, width), (width, inner)


@case("moe_experts", ROUNDED_INSIDE)
def plain_experts(s: Sizes) -> Arguments:
    matrices = [[s.normal(EXPERTS, N, K, scale=K**-0.5)] for N, K in expert_shapes(s)]
    return *visits(s), *matrices, False, FIRST_EXPERT, *s.config.activation_betas


def laid_out(lay_out: Callable[..., Sequence[Tensor]]) -> Callable[..., Arguments]:
    """For an operator of experts: its arguments with the tensors of each matrix as `lay_out` makes them."""

    def prepare(x: Tensor, weights: Tensor, ids: Tensor, w13: list[Tensor], w2: list[Tensor], *rest: Any) -> Arguments:
        return x, weights, ids, list(lay_out(x.dtype, *w13)), list(lay_out(x.dtype, *w2)), True, *rest[1:]

    return prepare


@case(
    "moe_experts_mxfp4",
    ROUNDED_INSIDE,
    kernels={"grouped_matmul_mxfp4": MXFP8_ROWS},
    prepare=laid_out(lambda dtype, packed, scale: (as_nz(packed, True), scale)),
)
def mxfp4_experts(s: Sizes) -> Arguments:
    """Any byte is a pair of values up to 6, here under scales of 2^-8 and 2^-9."""
    return *visits(s), *map(list, mxfp4_matrices(s)), False, FIRST_EXPERT, *s.config.activation_betas


def mxfp4_matrices(s: Sizes) -> Iterator[tuple[Tensor, Tensor]]:
    for N, K in expert_shapes(s):
        yield s.bytes(EXPERTS, N, K // 2), (s.below(2, EXPERTS, N, K // 32) + 118).to(torch.uint8)


@case(
    "moe_experts_w4a8",
    ROUNDED_INSIDE,
    kernels={"grouped_matmul_w4a8": INT8_ROWS_TWICE},
    prepare=laid_out(lambda dtype, *matrix: prepare_w4a8(*matrix)),
)
def w4a8_experts(s: Sizes) -> Arguments:
    matrices = []
    for N, K in expert_shapes(s):
        codes, scale = s.bytes(EXPERTS, N // 2, K).view(torch.int8), s.uniform(EXPERTS, N, 1, low=0.1, high=0.3)
        matrices.append([codes, scale * K**-0.5, w4a8_bias(codes, scale * K**-0.5)])
    return *visits(s), *matrices, False, FIRST_EXPERT, *s.config.activation_betas


@case(
    "moe_experts_int4_group",
    ROUNDED_INSIDE,
    prepare=laid_out(lambda dtype, *matrix: (*(int4_layout(part, dtype) for part in matrix[:-1]), matrix[-1])),
)
def int4_experts(s: Sizes) -> Arguments:
    """MXFP4's values, each the sum of two integers, laid out as loading does it."""
    matrices = (prepare_mxfp4_as_int4(packed, scale, s.dtype) for packed, scale in mxfp4_matrices(s))
    return (
        *visits(s),
        *([*codes, scale] for codes, scale in matrices),
        *(False, FIRST_EXPERT, *s.config.activation_betas),
    )


@case("dynamic_quant_int8", ONE_STEP, canonical=lambda codes, scale: (codes * scale.unsqueeze(-1), scale))
def rounding(s: Sizes) -> Arguments:
    return (s.normal(s.T, s.config.moe_intermediate_size),)


@case(
    "w8a8_linear",
    ROUNDED_ONCE,
    kernels={"npu_quant_matmul": INT8_ROWS},
    prepare=lambda x, weight, *rest: (x, prepare_w8a8(weight), *rest),
)
def int8_linear(s: Sizes) -> Arguments:
    """The first half of the shared experts."""
    I, O = s.config.hidden_size, 2 * s.config.num_shared_experts * s.config.moe_intermediate_size // s.attn_tp
    scale = s.uniform(O, low=0.5, high=1.5) * I**-0.5 / 64
    return s.normal(s.T, I), s.bytes(O, I).view(torch.int8), scale, None


@case("as_nz", EXACT)
def cast(s: Sizes) -> Arguments:
    return s.normal(EXPERTS, s.config.expert_hidden_size, s.config.moe_intermediate_size), False
