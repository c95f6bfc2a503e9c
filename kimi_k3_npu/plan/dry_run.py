"""One rank's pass at full size without memory: the real modules on the meta device, collectives recorded, not run.

Tokens are routed evenly: every expert gets the same share of rows, as a loss-free balanced router would send.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.model.attention import CachedAttention
from kimi_k3_npu.model.cache import ModelCache
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM, empty_bank
from kimi_k3_npu.model.experts import Experts
from kimi_k3_npu.model.moe import DispatchedMoE
from kimi_k3_npu.ops.mc2 import ExpertsFunction
from kimi_k3_npu.ops.op import OPS
from kimi_k3_npu.parallel.groups import Group
from kimi_k3_npu.parallel.layout import AxisName, ParallelLayout
from kimi_k3_npu.parallel.mesh import Mesh
from kimi_k3_npu.plan.formats import EXPERT_FORMS, held_parameters
from kimi_k3_npu.plan.meter import Account, Accounted, Count, Meter
from kimi_k3_npu.recipes.schema import CheckpointFormat

PassName = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Collective:
    """One collective of one rank: `sent` bytes leave it, over a ring or directly, for any of the group's ranks."""

    op: str
    axis: str
    ranks: int
    sent: int


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What one rank does in one pass.

    Args:
        requests: Sequences of each replica.
        queries: New tokens of each.
        context: Tokens of each in the cache, the new ones included.
        states: Bytes of KDA states and windows read and written; `kv`: of cache rows read and written.
    """

    name: PassName
    requests: int
    queries: int
    context: int
    count: Count
    collectives: tuple[Collective, ...]
    kv: int
    states: int

    @property
    def tokens(self) -> int:
        """Of one replica."""
        return self.requests * self.queries

    @property
    def sent(self) -> int:
        return sum(collective.sent for collective in self.collectives)

    @property
    def compulsory(self) -> int:
        """Bytes that no fusion can save: each weight that is used, once, and the caches."""
        return self.count.weights + self.kv + self.states


@dataclass
class Rank:
    """One rank of a layout, ready to be passed over: built once, on the meta device."""

    config: KimiK3Config
    layout: ParallelLayout
    form: CheckpointFormat
    rank: int = 0
    vision: bool = True
    #: Whether this package's model runs, or the engine's own, which may keep other weights quantised.
    own_model: bool = True
    log: list[Collective] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mesh = recording_mesh(self.layout, self.rank, self.log)
        with torch.device("meta"):
            experts = EXPERT_FORMS[self.form]
            self.model = KimiK3ForCausalLM(self.config, self.mesh, experts=experts, vision=self.vision)
        self.held = held_parameters(self.model, self.form, own_model=self.own_model)
        for module in self.model.modules():
            if isinstance(module, DispatchedMoE):
                module.dispatch = EvenDispatch(self.mesh.ep, self.config.text.num_experts, self.log)

    def run(self, name: PassName, requests: int, queries: int, context: int) -> Pass:
        """A pass of `requests` sequences of each replica, `queries` new tokens each, `context` tokens with those.

        It goes through all layers of the rank's stage, and the ends that it has. A prefill ends in the logits of each
        sequence's last token, a decode step in all.
        """
        self.log.clear()
        counts = [requests * queries] * self.layout.dp
        attention = self._attention(name, requests, queries, context)
        with torch.no_grad(), self._meter(attention.cache)() as count:
            model = self.model
            if model.is_first:
                prefix = model.embed(torch.empty(counts[0], dtype=torch.long, device="meta"), counts)
                bank = empty_bank(prefix)
            else:
                prefix, bank = self._stream(counts[0], self._layers[0] - 1)
            prefix, bank = model.run_layers(prefix, bank, attention, counts)
            if model.is_last:
                rows = model.finish(prefix, bank)
                rows = rows[:requests] if name == "prefill" else rows
                model.logits(rows, [len(rows)] * self.layout.dp)
        return self._done(name, requests, queries, context, count, attention.cache)

    def sample(self, name: PassName, requests: int, queries: int, context: int) -> Pass:
        """About the same from one layer of each kind, times how many there are, without the ends: much quicker."""
        count, log = Count(), []
        for layer, number in self._kinds().items():
            one, sent = self.one_layer(layer, name, requests, queries, context)
            for kernel, work in one.kernels.items():
                count.add(kernel, work.flops * number, work.bytes * number, work.launches * number)
            count.weights += one.weights * number
            count.peak = max(count.peak, one.peak)
            log += sent * number
        self.log[:] = log
        return self._done(name, requests, queries, context, count, self.model.new_cache(requests, context))

    def one_layer(
        self,
        layer: int,
        name: PassName,
        requests: int,
        queries: int,
        context: int,
        fused: Set[str] = frozenset(),
    ) -> tuple[Count, list[Collective]]:
        """One layer of the rank's stage, with the streams that reach it; what is sent stays out of `log`.

        Intermediate results of the operators in `fused` do not count as live.
        """
        self.log.clear()
        tokens = requests * queries
        attention = self._attention(name, requests, queries, context)
        meter = self._meter(attention.cache, fused)
        with torch.no_grad(), meter() as count:
            prefix, bank = self._stream(tokens, layer)
            meter.track([prefix, bank])
            self.model.layers[str(layer)](prefix, bank, attention, [tokens] * self.layout.dp)
        sent = list(self.log)
        self.log.clear()
        return count, sent

    @property
    def _layers(self) -> range:
        return self.layout.stage_layers(self.mesh.stage, self.config.text)

    def _kinds(self) -> dict[int, int]:
        """The last layer of each kind in the stage, whose bank has the most rows, and how many there are."""
        text = self.config.text
        kinds: dict[tuple[str, bool], list[int]] = {}
        for layer in self._layers:
            kinds.setdefault((text.layer_kinds[layer], text.is_moe(layer)), []).append(layer)
        return {layers[-1]: len(layers) for layers in kinds.values()}

    def peak(self, tokens: int, fused: Set[str]) -> tuple[int, set[str]]:
        """The most bytes live at once when a new sequence of `tokens` passes the stage, and the axes that it uses."""
        most, axes = 0, set()
        for layer in self._kinds():
            count, sent = self.one_layer(layer, "prefill", 1, tokens, tokens, fused)
            most = max(most, count.peak)
            axes |= {collective.axis for collective in sent}
        return most, axes

    def _attention(self, name: PassName, requests: int, queries: int, context: int) -> CachedAttention:
        cache = self.model.new_cache(requests, context)
        slots = [cache.join() for _ in range(requests)]
        cache.advance(slots, [context - queries] * requests)
        form: Literal["auto", "absorbed"] = "absorbed" if name == "decode" else "auto"
        return CachedAttention(cache, slots, [queries] * requests, form=form)

    def _meter(self, cache: ModelCache, fused: Set[str] = frozenset()) -> Meter:
        """Weights count in the size that their format gives them; the cache's pools are there already."""
        meter = Meter(self._weights(), self._accounts(), {"latent_attention": _latent_attention_bytes}, fused)
        for pool in cache.pools():
            meter.keep(pool)
        return meter

    def _stream(self, tokens: int, layer: int) -> tuple[Tensor, Tensor]:
        """What travels between layers as it leaves `layer`: the running sum and the bank."""
        text, dtype = self.config.text, self.model.dtype
        rows = 0 if text.attn_res_block_size is None else layer // text.attn_res_block_size + 1
        prefix = torch.empty(tokens, text.hidden_size, dtype=dtype, device="meta")
        return prefix, torch.empty(tokens, rows, text.hidden_size, dtype=dtype, device="meta")

    def _done(self, name: PassName, requests: int, queries: int, context: int, count: Count, cache: ModelCache) -> Pass:
        text, layers = self.config.text, self._layers
        rows = sum(pool[:, 0].nbytes for i in text.mla_layers if i in layers for pool in cache.mla_pools(i))
        states = sum(pool.nbytes for i in text.kda_layers if i in layers for pool in cache.kda_pools(i))
        return Pass(
            name=name,
            requests=requests,
            queries=queries,
            context=context,
            count=count,
            collectives=tuple(self.log),
            kv=rows * (context + queries),
            states=2 * states,
        )

    def _weights(self) -> dict[int, int]:
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return {tensor.untyped_storage()._cdata: self.held[path].total for path, tensor in named.items()}

    def _accounts(self) -> dict[str, Account]:
        text = self.config.text
        held = max(1, text.num_experts // self.layout.ep)
        visited = next((module for module in self.model.modules() if isinstance(module, Experts)), None)
        names = [] if visited is None else [name for name, module in self.model.named_modules() if module is visited]
        each = sum(size.total for path, size in self.held.items() if path.rpartition(".")[0] in names) // held
        inner = text.moe_intermediate_size // self.layout.moe_tp if text.num_experts else 0

        def visit(x: Tensor, weights: Tensor, ids: Tensor, *_: Any) -> Accounted:
            # A row with one id has been sent to its expert's rank; otherwise a token's experts are anywhere.
            pairs = ids.numel() if ids.shape[1] == 1 else math.ceil(ids.numel() * held / text.num_experts)
            width = x.shape[-1]
            read = math.ceil(hit_experts(pairs, held) * each)
            # Rows go into and come out of two products, gate and up together being twice as wide.
            rows = pairs * (2 * width + 3 * inner) * x.element_size()
            return Accounted(torch.empty_like(x), 2 * pairs * 3 * inner * width, read + rows, read)

        return dict.fromkeys(filter(is_of_experts, OPS), visit)


def is_of_experts(operator: str) -> bool:
    """Whether an operator, by its name, is the routed experts in some format."""
    return operator.startswith("moe_experts")


def hit_experts(pairs: int, experts: int) -> float:
    """How many of `experts` get at least one of `pairs` rows that are drawn evenly."""
    return experts * (1 - (1 - 1 / experts) ** pairs) if experts else 0.0


def _latent_attention_bytes(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    rope: Tensor,
    slots: Any,
    queries: Any,
    lengths: Sequence[int],
    *_: Any,
) -> int:
    """Of the pools only the rows of the sequences are read."""
    row = (latent.shape[-1] + rope.shape[-1]) * latent.element_size()
    return sum(lengths) * row + (2 * q_latent.numel() + q_rope.numel()) * q_latent.element_size()


class EvenDispatch:
    """An expert dispatch that records the all-to-alls of an even router and runs this rank's experts on its share."""

    def __init__(self, group: Group, num_experts: int, log: list[Collective]) -> None:
        self.group, self.num_experts, self.log = group, num_experts, log

    def __call__(self, z: Tensor, weights: Tensor, ids: Tensor, experts: ExpertsFunction, largest: int) -> Tensor:
        """Every rank sends its rows to their experts, and they come back: as many arrive as leave."""
        pairs = max(1, ids.numel())
        rows = z.new_empty(pairs, z.shape[1])
        self._record("dispatch", rows)
        results = experts(rows, weights.new_empty(pairs, 1), ids.new_empty(pairs, 1))
        self._record("combine", results)
        return torch.empty_like(z)

    def _record(self, op: str, rows: Tensor) -> None:
        if self.group.size > 1:
            self.log.append(Collective(op, self.group.name, self.group.size, _away(self.group, rows.nbytes)))


@dataclass(frozen=True, eq=False)
class RecordingGroup(Group):
    """A group whose collectives only note what they would send; results have the right shape and no content."""

    log: list[Collective] = field(default_factory=list)

    def all_reduce(self, x: Tensor) -> Tensor:
        # A ring sends every share twice: once to be summed, once summed.
        return self._note("all-reduce", 2 * _away(self, x.nbytes), x)

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        if self.size == 1:
            return x
        gathered = x.new_empty(sum(counts), *x.shape[1:])
        return self._note("all-gather", _away(self, gathered.nbytes), gathered)

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        if self.size == 1:
            return x
        return self._note("reduce-scatter", _away(self, x.nbytes), x.new_empty(counts[self.rank], *x.shape[1:]))

    def _note(self, op: str, sent: int, result: Tensor) -> Tensor:
        if self.size > 1:
            self.log.append(Collective(op, self.name, self.size, sent))
        return result


def _away(group: Group, size: int) -> int:
    """The part of `size` bytes that an even exchange sends to other ranks."""
    return size * (group.size - 1) // group.size


def recording_mesh(layout: ParallelLayout, rank: int, log: list[Collective]) -> Mesh:
    """The mesh of `rank`, whose collectives go to `log`."""
    mesh = Mesh.inspect(layout, rank)
    names: list[str] = [*get_args(AxisName), "mc2"]
    groups = {name: getattr(mesh, name) for name in names}
    recording: dict[str, Any] = {
        name: RecordingGroup(group.name, group.rank, group.size, None, log) for name, group in groups.items()
    }
    return replace(mesh, **recording)


def dry_run(
    config: KimiK3Config,
    layout: ParallelLayout,
    form: CheckpointFormat,
    *,
    prefill: int,
    decode: tuple[int, int],
    context: int,
    stage: int = 0,
    own_model: bool = True,
) -> tuple[Pass, ...]:
    """The passes of a rank of `stage`: one new sequence of `prefill` tokens (0: none), and a decode step of
    decode = (requests, rows of each) with `context` tokens a request. Raises LayoutError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rank = Rank(config, layout, form, stage * layout.tp, own_model=own_model)
    passes = []
    if prefill:
        passes.append(rank.run("prefill", 1, prefill, prefill))
    if decode[0]:
        passes.append(rank.run("decode", decode[0], decode[1], context))
    return tuple(passes)
