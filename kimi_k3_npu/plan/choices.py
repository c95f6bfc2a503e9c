"""Which NPU kernels the layers of a model take: the choices of its own modules, recorded on the meta device.

One layer of each kind goes through a decode step and a prefill pass. Nothing is computed: every operator is asked which
kernel it takes for the very arguments that its module passes.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kimi_k3_npu.config import TextConfig
from kimi_k3_npu.errors import LayoutError
from kimi_k3_npu.formats import FORMATS
from kimi_k3_npu.model.cache import ModelCache
from kimi_k3_npu.model.decoder import DecoderLayer
from kimi_k3_npu.model.experts import Experts
from kimi_k3_npu.model.mlp import MLP
from kimi_k3_npu.model.moe import DispatchedMoE, LatentMoE
from kimi_k3_npu.ops.device import Device, assume
from kimi_k3_npu.ops.mc2 import ExpertsFunction
from kimi_k3_npu.ops.op import OPS, Choice, Op
from kimi_k3_npu.ops.quant_linear import w8a8_linear
from kimi_k3_npu.parallel.experts import Mc2
from kimi_k3_npu.parallel.layout import ParallelLayout
from kimi_k3_npu.parallel.linear import MergedLinear, RowLinear
from kimi_k3_npu.parallel.mesh import Mesh
from kimi_k3_npu.plan.batch import Batch
from kimi_k3_npu.plan.dry_run import EvenDispatch, is_of_experts, recording_mesh

#: The part of the network that has the operator, in the order of a table.
Block = Literal["every layer", "KDA", "MLA", "MoE", "dense MLP"]
#: Decode: T sequences of one token each. Prefill: one new sequence of T tokens. Any: the operator sees only T tokens.
Phase = Literal["any", "decode", "prefill"]

_PASSES: tuple[Phase, ...] = ("decode", "prefill")


def _first_alike(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


#: What stands for the results of operators whose references count values, go through the tokens in a loop, or are slow
#: without memory.
RESULTS: dict[str, Callable[..., Any]] = {
    "rms_norm": _first_alike,
    "mix_residuals": _first_alike,
    "situ_and_mul": lambda gate_up, *_: gate_up[:, : gate_up.shape[1] // 2],
    "kda_gate": lambda f, *_: torch.empty_like(f, dtype=torch.float32),
    "short_conv": lambda x, weight, window, *_: (torch.empty_like(x), window),
    "kda_chunk": lambda q, k, v, g, beta, state, *_: (torch.empty_like(v, dtype=torch.float32), state),
    "latent_attention": _first_alike,
    "causal_attention": lambda q, k, v, *_: v.new_empty(len(q), *v.shape[1:]),
    "int4_layout": _first_alike,
}


def _row(x: Tensor) -> str:
    """What one row of a tensor is, after its number of rows."""
    return ", ".join(map(str, x.shape[1:]))


#: Arguments in words, where it is not every operand. T and R are as `LayerKernel` has them.
SHAPES: dict[str, Callable[..., str]] = {
    "rms_norm": lambda x, *_: f"[T, {_row(x)}]" + " fp32" * (x.dtype == torch.float32),
    "mix_residuals": lambda prefix, bank, *_: f"[T, 1..{bank.shape[1]} + 1, {bank.shape[2]}]",
    "kda_gate": lambda f, *_: f"[T, {_row(f)}]",
    "kda_chunk": lambda q, k, v, g, beta, state, *_: f"[T, {_row(q)}], state [{_row(state)}]",
    "latent_attention": lambda q, rope, latent, _, slots, queries, lengths, scale: (
        f"[T, {_row(q)} + {rope.shape[2]}] over {lengths[0]} rows"
    ),
    "causal_attention": lambda q, k, v, *_: f"[T, {_row(q)}], values [T, {_row(v)}]",
    "route": lambda logits, bias, top_k, *_: f"[R, {_row(logits)}] fp32, top {top_k}",
    "situ_and_mul": lambda gate_up, *_: f"[R, 2 x {gate_up.shape[1] // 2}]",
    "w8a8_linear": lambda x, weight, *_: f"[R, {_row(x)}] x [{_row(weight)}, {len(weight)}] int8",
}


def _operands(x: Tensor, *others: Any) -> str:
    return " x ".join([f"[T, {_row(x)}]", *(str(list(one.shape)) for one in others if isinstance(one, Tensor))])


@dataclass(frozen=True)
class LayerKernel:
    """The kernel of one operator for one number of tokens; None when there are none, and nothing is launched.

    `shape` is in words, with T tokens of each data-parallel replica and R rows that one rank's MLP or experts see;
    `refused` has the kernels that come before, with the reason against each.
    """

    block: Block
    op: str
    phase: Phase
    tokens: int
    shape: str
    kernel: str | None
    refused: Mapping[str, str]


@dataclass(frozen=True)
class Situation:
    """What the choices depend on beside the model; `tokens` is of each data-parallel replica."""

    tokens: int
    layout: ParallelLayout
    device: Device
    dtype: torch.dtype = torch.bfloat16
    #: Tokens that each sequence has in the cache in a decode step, its new one included.
    context: int = 4096


def layer_kernels(config: TextConfig, now: Situation) -> list[LayerKernel]:
    """The kernel of every operator that has a choice and is the same however weights are stored (see `weight_kernels`).

    Raises:
        LayoutError: The layout cannot split this model.
        LaunchError: A kernel is forced (KIMI_K3_NPU_V_UP) that cannot be used here.
    """
    return [row for row in _recorded(config, now).table if not is_of_experts(row.op)]


def weight_kernels(config: TextConfig, now: Situation) -> list[LayerKernel]:
    """The kernels of routed experts and of int8 linear layers, in each form in which their weights may be stored.

    Weights are taken as laid out for the device after loading. Raises LayoutError.
    """
    recorder = _recorded(config, now)
    recorder.rows.clear()
    for name, format in FORMATS.items():
        if format.kept:
            recorder.run_experts(name)
    recorder.ask_for_int8()
    return recorder.table


def expert_kernel(config: TextConfig, now: Situation, form: str) -> LayerKernel | None:
    """The kernel of the routed experts in `form`; None for a model without any. Raises LayoutError."""
    recorder = _recorded(config, now)
    recorder.rows.clear()
    recorder.run_experts(form)
    return next(iter(recorder.table), None)


def _recorded(config: TextConfig, now: Situation) -> _Recorder:
    """What one layer of each kind does in a decode step and in a prefill pass."""
    now.layout.check(config)
    mesh, layers = _layers(config, now.layout, now.dtype)
    recorder = _Recorder(config, mesh, now)
    cache = ModelCache(config, 1, now.context, dtype=now.dtype, device="meta", attn_tp=mesh.attn_tp)
    for index, layer in layers.items():
        recorder.is_deepest = index == max(layers)
        for phase in _PASSES:
            recorder.run_layer(index, layer, cache, phase)
    return recorder


@functools.lru_cache(maxsize=8)
def _layers(config: TextConfig, layout: ParallelLayout, dtype: torch.dtype) -> tuple[Mesh, dict[int, DecoderLayer]]:
    """The last layer of each kind, on the rank that is dealt the most of its replica's rows."""
    last = {(kind, config.is_moe(index)): index for index, kind in enumerate(config.layer_kinds)}
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")  # making the layout has warned already
        mesh = recording_mesh(replace(layout, pp=1), layout.attn_tp - 1, [])
        return mesh, {
            index: DecoderLayer(config, index, mesh, dtype, experts="plain") for index in sorted(last.values())
        }


class _Recorder(TorchFunctionMode):
    """Notes the kernel of every operator, in the block that is running, and goes on with results of the right shape."""

    def __init__(self, config: TextConfig, mesh: Mesh, now: Situation) -> None:
        super().__init__()
        # Where there are no tokens nothing is launched: the rows are those of one token, without a kernel.
        self.config, self.mesh, self.now, self.tokens = config, mesh, now, max(1, now.tokens)
        self.rows: dict[tuple[str, ...], LayerKernel] = {}
        self.block: Block = "every layer"
        self.phase: Phase = "any"
        self.is_deepest = True
        self._experts: tuple[Tensor, ...] = ()
        self._expert_shape = ""
        self._linears: dict[tuple[Block, torch.Size], tuple[Tensor, Tensor]] = {}

    @property
    def table(self) -> list[LayerKernel]:
        return sorted(self.rows.values(), key=lambda row: get_args(Block).index(row.block))

    def run_layer(self, index: int, layer: DecoderLayer, cache: ModelCache, phase: Phase) -> None:
        self.phase, tokens, text = phase, self.tokens, self.config
        decodes = phase == "decode"
        sizes = (tokens, 1, self.now.context) if decodes else (1, tokens, tokens)
        rows = -(-index // text.attn_res_block_size) if text.attn_res_block_size else 0  # blocks that began before
        with torch.device("meta"):
            prefix = torch.empty(tokens, text.hidden_size, dtype=self.now.dtype)
            bank = torch.empty(tokens, rows, text.hidden_size, dtype=self.now.dtype)
        with self._on_device(), self._watched(index, layer), self:
            layer(prefix, bank, Batch(cache, *sizes, decodes=decodes), [tokens] * self.now.layout.dp)

    def run_experts(self, form: str) -> None:
        """The routed experts in `form`, for the rows that plain ones got, laid out as they are after loading."""
        if not self._experts:
            return
        self.block, self.phase = "MoE", "any"
        with self._on_device(), torch.device("meta"), self:
            try:
                experts = Experts(self.config, self.mesh, self.now.dtype, FORMATS[form])
            except LayoutError as error:  # this form alone: its groups do not split like the others' matrices
                self._add(f"moe_experts, {form}", "any", self._expert_shape, None, {"all": str(error)})
                return
            experts.prepare()
            experts(*self._experts)

    def ask_for_int8(self) -> None:
        """The linear layers of MLPs, if their weights were int8."""
        with self._on_device():
            for (block, _), (x, weight) in self._linears.items():
                self.block, self.phase = block, "any"
                codes = torch.empty_like(weight, dtype=torch.int8)
                scale = torch.empty(len(weight), 1, dtype=torch.float32, device="meta")
                self._ask(w8a8_linear, x, codes, scale, None)

    def note(self, choice: Choice, phase: Phase, shape: str) -> None:
        if self.now.tokens:
            self._add(choice.op, phase, shape, choice.name, choice.refused)
        else:
            self._add(choice.op, phase, shape, None, {})

    def _add(self, op: str, phase: Phase, shape: str, kernel: str | None, refused: Mapping[str, str]) -> None:
        row = LayerKernel(self.block, op, phase, self.now.tokens, shape, kernel, refused)
        if self.block != "every layer":
            self.rows.setdefault((row.block, row.op, phase, shape), row)
        elif self.is_deepest:  # where the bank has the most rows, and of its mixtures the last
            self.rows[row.block, row.op] = row

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "namespace", None) != "kimi_k3":
            return func(*args, **kwargs)
        op = OPS[func.__name__.partition(".")[0]]
        if op.kernels:
            self._ask(op, *args)
        stand_in = _first_alike if is_of_experts(op.name) else RESULTS.get(op.name)
        return (stand_in or op.npu_layout or func)(*args)

    def _ask(self, op: Op, *args: Any) -> None:
        choice = op.choice(*args)
        assert choice is not None, op.name
        phase = self.phase if "SymInt[]" in str(op.overload._schema) else "any"  # lengths of sequences
        shape = self._expert_shape if is_of_experts(op.name) else SHAPES.get(op.name, _operands)(*args)
        self.note(choice, phase, shape)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        with assume(self.now.device), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a kernel is refused for is in the table
            yield

    @contextmanager
    def _watched(self, index: int, layer: DecoderLayer) -> Iterator[None]:
        """Follow which block of `layer` runs, and what its experts and the linear layers of its MLP are given."""
        attention: Block = "KDA" if self.config.layer_kinds[index] == "kda" else "MLA"
        handles = self._follow(layer.self_attn, attention)
        handles += self._follow(layer.mlp, "MoE" if self.config.is_moe(index) else "dense MLP")
        for mlp in (module for module in layer.modules() if isinstance(module, MLP)):
            linears = (module for module in mlp.modules() if isinstance(module, MergedLinear | RowLinear))
            handles += [linear.register_forward_pre_hook(self._keep_linear) for linear in linears]
        if isinstance(layer.mlp, LatentMoE):
            handles.append(layer.mlp.experts.register_forward_pre_hook(self._keep_experts))
        try:
            with self._sent_evenly(layer.mlp) if isinstance(layer.mlp, DispatchedMoE) else nullcontext():
                yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _sent_evenly(self, moe: DispatchedMoE) -> Iterator[None]:
        """Let rows travel as an even router would send them, and MC2 say whether it would carry them."""
        real, even = moe.dispatch, EvenDispatch(self.mesh.ep, self.config.num_experts, [])

        def dispatch(z: Tensor, weights: Tensor, ids: Tensor, experts: ExpertsFunction, largest: int) -> Tensor:
            if isinstance(real, Mc2):
                shape = f"[R, {_row(z)}] over {real.group.size} ranks"
                self.note(real.choose(real.exchange(z, ids, largest)), "any", shape)
            return even(z, weights, ids, experts, largest)

        moe.dispatch = dispatch
        try:
            yield
        finally:
            moe.dispatch = real

    def _follow(self, module: nn.Module, block: Block) -> list[Any]:
        def enter(*_: Any) -> None:
            self.block = block

        def leave(*_: Any) -> None:
            self.block = "every layer"

        return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]

    def _keep_linear(self, module: MergedLinear | RowLinear, args: tuple[Tensor]) -> None:
        self._linears[self.block, module.weight.shape] = args[0], module.weight

    def _keep_experts(self, module: Any, args: tuple[Tensor, ...]) -> None:
        self._experts = args
        held, width, inner = module.w2.shape
        self._expert_shape = f"[R, {width}] to {held} experts of {inner}"
