"""Which ranks share which weights: the parallel layout as plain arithmetic, without any process.

Ranks of one pipeline stage are numbered as SGLang numbers them: attn_tp varies fastest, then the data-parallel replica.

| block | sharded over | tokens before | tokens after |
|---|---|---|---|
| KDA, MLA heads, output gate | attn_tp | own | sum over attn_tp |
| dense MLP | tp | all replicas' | sum, own rows back |
| dense MLP, enable_dense_mlp_attn_tp | attn_tp | own | sum over attn_tp |
| routed experts, gather | ep x moe_tp = tp | all replicas' | sum, own rows back, then the latent norm |
| routed experts, alltoall or mc2 | ep = tp | own share of the rows, dispatched | combined, rows gathered over attn_tp |
| shared experts, gather | tp | all replicas' | sum, own rows back |
| shared experts, alltoall or mc2 | none: replicated | own share of the rows | - |
| the same, enable_shared_experts_attn_tp or a size | attn_tp, or that many of it | rows gathered | rows scattered |
| latent projections, router, norms, mixers | none: replicated | | |
| embedding, head | tp, or attn_tp with enable_dp_lm_head; vocabulary padded to whole shards | | |
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from kimi_k3_npu.config import TextConfig
from kimi_k3_npu.errors import IgnoredOptionError, LayoutError

Dispatch = Literal["gather", "alltoall", "mc2"]
#: Of the axes that a weight or the tokens can be split over.
AxisName = Literal["tp", "attn_tp", "dp", "ep", "moe_tp", "shared", "dense", "vocab"]

#: Environment variables that SGLang had before the options, and the option that took the place of each.
FORMER_VARIABLES = {
    "SGLANG_K3_SHARED_EXPERTS_ATTN_TP": "enable_shared_experts_attn_tp",
    "SGLANG_K3_DENSE_MLP_ATTN_TP": "enable_dense_mlp_attn_tp",
}


#: More than any cluster has: what is above is a slip of the keyboard, and would take forever to divide.
MOST_RANKS = 2**16


@dataclass(frozen=True)
class Axis:
    """The ranks (of one pipeline stage) that form a group, and this rank's place among them."""

    name: AxisName
    members: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        return len(self.members)


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """How one model is spread over tp x pp ranks. Option names and meanings are those of SGLang's server arguments.

    `dp` counts attention data-parallel replicas inside tp, `ep` the expert-parallel ranks inside tp. Raises LayoutError
    for a combination that cannot work on any model; `check` adds what depends on the model.
    """

    tp: int = 1
    dp: int = 1
    ep: int = 1
    pp: int = 1
    moe_dispatch: Dispatch = "gather"
    enable_shared_experts_attn_tp: bool = False
    shared_experts_tp_size: int | None = None
    enable_dense_mlp_attn_tp: bool = False
    enable_dp_lm_head: bool = False

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "ep", "pp"):
            if (size := getattr(self, name)) < 1:
                raise LayoutError(f"{name} = {size}, must be at least 1")
            if size > MOST_RANKS:
                raise LayoutError(f"{name} = {size}, must be at most {MOST_RANKS}")
        if self.moe_dispatch not in get_args(Dispatch):
            raise LayoutError(f"dispatch is {self.moe_dispatch!r}; choices: {', '.join(get_args(Dispatch))}")
        for name in ("dp", "ep"):
            if self.tp % getattr(self, name):
                found = f"{name} = {getattr(self, name)} does not divide tp = {self.tp}"
                raise LayoutError(f"{found}; {name} that does: {_listed(_divisors(self.tp))}")
        if self.uses_all_to_all and self.ep != self.tp:
            raise LayoutError(
                f"dispatch={self.moe_dispatch} needs whole experts on every rank: ep = tp = {self.tp}, "
                f"found ep = {self.ep}"
            )
        self._check_shared()
        for note in self.notes():
            warnings.warn(note, stacklevel=3)

    def _check_shared(self) -> None:
        size = self.shared_experts_tp_size
        if not self.uses_all_to_all and (self.enable_shared_experts_attn_tp or size is not None):
            raise IgnoredOptionError(
                "enable_shared_experts_attn_tp and shared_experts_tp_size need an all-to-all dispatch; with "
                "dispatch=gather shared experts are split over tp already. Use dispatch=alltoall (with ep = tp), or "
                "leave the option out"
            )
        if size is not None and (size < 1 or self.attn_tp % size):
            raise LayoutError(
                f"shared_experts_tp_size = {size} does not divide attn_tp = {self.attn_tp}; "
                f"sizes that do: {_listed(_divisors(self.attn_tp))}"
            )

    def notes(self) -> tuple[str, ...]:
        """The options that have no effect here, a sentence each. Making the layout has warned of them."""
        size, found = self.shared_experts_tp_size, []
        for option in ("enable_dense_mlp_attn_tp", "enable_dp_lm_head"):
            if getattr(self, option) and self.dp == 1:
                found.append(f"{option} changes nothing with dp = 1: attn_tp is tp")
        if self.enable_shared_experts_attn_tp and size is not None and size != self.attn_tp:
            found.append(f"shared_experts_tp_size = {size} takes precedence over enable_shared_experts_attn_tp")
        elif self.enable_shared_experts_attn_tp and self.attn_tp == 1:
            found.append("enable_shared_experts_attn_tp changes nothing with attn_tp = 1 (dp = tp)")
        return tuple(found)

    @property
    def attn_tp(self) -> int:
        return self.tp // self.dp

    @property
    def moe_tp(self) -> int:
        """Ranks that share one expert."""
        return self.tp // self.ep

    @property
    def world(self) -> int:
        return self.tp * self.pp

    @property
    def uses_all_to_all(self) -> bool:
        return self.moe_dispatch != "gather"

    @property
    def shared_ways(self) -> int:
        """Ranks that share the shared experts' weights; 1: every rank holds them whole."""
        if not self.uses_all_to_all:
            return self.tp
        if self.shared_experts_tp_size is not None:
            return self.shared_experts_tp_size
        return self.attn_tp if self.enable_shared_experts_attn_tp else 1

    def axis(self, name: AxisName, rank: int) -> Axis:
        """The group that `rank` (0 .. tp - 1 of its stage) forms along `name`."""
        if not 0 <= rank < self.tp:
            raise LayoutError(f"rank {rank} is outside 0..{self.tp - 1}")
        replica, within = divmod(rank, self.attn_tp)
        block = {
            "tp": self.tp,
            "attn_tp": self.attn_tp,
            "moe_tp": self.moe_tp,
            "shared": self.shared_ways,
            "dense": self.attn_tp if self.enable_dense_mlp_attn_tp else self.tp,
            "vocab": self.attn_tp if self.enable_dp_lm_head else self.tp,
        }
        if name == "dp":
            return Axis(name, tuple(range(within, self.tp, self.attn_tp)), replica)
        if name == "ep":
            return Axis(name, tuple(range(rank % self.moe_tp, self.tp, self.moe_tp)), rank // self.moe_tp)
        first = rank - rank % block[name]
        return Axis(name, tuple(range(first, first + block[name])), rank - first)

    def stage_layers(self, stage: int, config: TextConfig) -> range:
        """The layers of pipeline stage `stage`: whole residual blocks (single layers without them), shared out
        evenly."""
        layers, block = config.num_hidden_layers, config.attn_res_block_size or 1
        blocks = -(-layers // block)
        if self.pp > blocks:
            raise LayoutError(
                f"pp = {self.pp}, but the {layers} layers are only {blocks} residual blocks of {block}, which stay "
                f"whole; pp that works: 1..{blocks}"
            )
        cuts = [min(block * (blocks * i // self.pp), layers) for i in range(self.pp + 1)]
        return range(cuts[stage], cuts[stage + 1])

    def check(self, config: TextConfig, *, expert_group: int = 1) -> None:
        """Raise LayoutError for the first thing of `config` that this layout cannot split, saying what would work.

        `expert_group` is the number of inputs that share a scale in the stored experts: 1 for plain, 32 for MXFP4.
        The vocabulary always splits: it is padded to whole shares.
        """
        self._check_heads(config)
        if config.num_experts:
            self._check_experts(config, expert_group)
            shared = config.num_shared_experts * config.moe_intermediate_size
            by = "tp" if not self.uses_all_to_all else "shared_experts_tp_size"
            _check_width("the shared experts' width", shared, by, self.shared_ways)
        if len(config.moe_layers) < config.num_hidden_layers:
            width, by = config.intermediate_size, "attn_tp" if self.enable_dense_mlp_attn_tp else "tp"
            way_out = ""
            if not self.enable_dense_mlp_attn_tp and width % self.attn_tp == 0:
                way_out = f"; or use enable_dense_mlp_attn_tp (attn_tp = {self.attn_tp})"
            _check_width("the dense MLP's width", width, by, self.axis("dense", 0).size, way_out)
        for stage in range(self.pp):
            self.stage_layers(stage, config)

    def _check_heads(self, config: TextConfig) -> None:
        heads = {"attention heads": config.num_attention_heads, "KDA heads": config.kda_num_heads}
        for what, total in heads.items():
            if total % self.attn_tp:
                works = [dp for dp in _divisors(self.tp) if not any(n % (self.tp // dp) for n in heads.values())]
                raise LayoutError(
                    f"{total} {what} do not split over attn_tp = {self.attn_tp} (tp = {self.tp}, dp = {self.dp}); "
                    f"dp that works with this tp: {_listed(works)}"
                )

    def _check_experts(self, config: TextConfig, group: int) -> None:
        experts, inner = config.num_experts, config.moe_intermediate_size
        works = [ep for ep in _divisors(self.tp) if not experts % ep and not inner % (self.tp // ep * group)]
        way_out = f"ep that works with tp = {self.tp}: {_listed(works)}"
        if self.uses_all_to_all:
            way_out = f"tp that works with dispatch={self.moe_dispatch}: {_listed(_divisors(experts))}"
        if experts % self.ep:
            raise LayoutError(
                f"{experts} experts over ep = {self.ep} is {experts / self.ep:.2f} a rank, experts must be whole; "
                f"{way_out}"
            )
        if inner % (self.moe_tp * group):
            rule = f"a multiple of {group}, the inputs that share a scale" if group > 1 else "whole"
            raise LayoutError(
                f"experts of width {inner} over tp / ep = {self.moe_tp} ranks is {inner / self.moe_tp:g} a rank, must "
                f"be {rule}; split whole experts instead: {way_out}"
            )

    @classmethod
    def parse(cls, text: str) -> ParallelLayout:
        """Read `tp=64,dp=4,ep=64,dispatch=alltoall,shared=attn_tp,dense=attn_tp,lm_head=dp` (any part may be absent).

        shared is `attn_tp` or a number, dense `tp` or `attn_tp`, lm_head `tp` or `dp`.
        """
        options: dict[str, Any] = {}
        seen: set[str] = set()
        for key, value in (_key_value(item) for item in text.split(",") if item.strip()):
            if key in seen:
                raise LayoutError(f"layout: {key} is given twice")
            seen.add(key)
            if key in ("tp", "dp", "ep", "pp"):
                options[key] = _number(key, value)
            elif key == "dispatch":
                options["moe_dispatch"] = value
            elif key == "shared":
                if value == "attn_tp":
                    options["enable_shared_experts_attn_tp"] = True
                else:
                    options["shared_experts_tp_size"] = _number(key, value)
            elif key in ("dense", "lm_head"):
                on, off = ("attn_tp", "tp") if key == "dense" else ("dp", "tp")
                if value not in (on, off):
                    raise LayoutError(f"layout: {key}={value}; choices: {off}, {on}")
                options["enable_dense_mlp_attn_tp" if key == "dense" else "enable_dp_lm_head"] = value == on
            else:
                raise LayoutError(
                    f"layout: unknown key {key!r}; keys: tp, dp, ep, pp, dispatch, shared, dense, lm_head"
                )
        if options.get("moe_dispatch", "gather") != "gather":
            options.setdefault("ep", options.get("tp", 1))
        return cls(**options)

    def with_former_variables(
        self, environment: Mapping[str, str], *, given: frozenset[str] = frozenset()
    ) -> ParallelLayout:
        """The layout with SGLang's former environment variables applied, each with a warning that names its option.

        `given` names the options that were set explicitly: a variable that contradicts one is a LayoutError.
        """
        changes: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for variable, option in FORMER_VARIABLES.items():
            value = environment.get(variable)
            if not value:
                continue
            if value.lower() not in _BOOLEANS:
                raise LayoutError(f"{variable}={value!r} is neither true nor false; set {option} instead")
            wanted = _BOOLEANS[value.lower()]
            if option in given and wanted != getattr(self, option):
                raise LayoutError(
                    f"{variable}={value} contradicts {option} = {getattr(self, option)}; unset the variable"
                )
            key = "shared" if "shared" in option else "dense"
            use = f"--{option.replace('_', '-')}, or {key}=attn_tp in a layout"
            warnings.warn(f"{variable} is a former name: use {use}", stacklevel=2)
            changes[option] = wanted
        return ParallelLayout(**changes)

    def __str__(self) -> str:
        """The layout as `parse` reads it; of two options for the shared experts, the one that takes precedence."""
        parts = [f"{name}={getattr(self, name)}" for name in ("tp", "dp", "ep", "pp") if getattr(self, name) > 1]
        if self.uses_all_to_all:
            parts.append(f"dispatch={self.moe_dispatch}")
        if self.shared_experts_tp_size is not None:
            parts.append(f"shared={self.shared_experts_tp_size}")
        elif self.enable_shared_experts_attn_tp:
            parts.append("shared=attn_tp")
        if self.enable_dense_mlp_attn_tp:
            parts.append("dense=attn_tp")
        if self.enable_dp_lm_head:
            parts.append("lm_head=dp")
        return ",".join(parts) or "tp=1"


_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def near_divisors(total: int, size: int) -> str:
    """The divisors of `total` up to twice `size`, for a message that says what would work instead of `size`."""
    return _listed([d for d in _divisors(total) if d <= 2 * size])


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def _check_width(what: str, width: int, by: str, ways: int, way_out: str = "") -> None:
    if width % ways:
        sizes = near_divisors(width, ways)
        raise LayoutError(f"{what} of {width} does not split over {by} = {ways}; sizes that do: {sizes}{way_out}")


def _key_value(item: str) -> tuple[str, str]:
    key, equals, value = item.strip().partition("=")
    if not equals or not value:
        raise LayoutError(f"layout: {item.strip()!r} is not key=value")
    return key.strip(), value.strip()


def _number(key: str, value: str) -> int:
    if not value.isdecimal():
        raise LayoutError(f"layout: {key}={value} is not a number")
    return int(value)
