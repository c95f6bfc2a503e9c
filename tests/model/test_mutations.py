"""The oracles would notice: each plausible misreading of the model moves the logits far beyond the tolerance."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kimi_k3_npu import CheckpointError, ConfigError, KimiK3Config, load_model
from kimi_k3_npu.model.attention import CachedAttention
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
from kimi_k3_npu.model.decoder import DecoderLayer
from kimi_k3_npu.model.experts import Experts
from kimi_k3_npu.model.kda import KimiDeltaAttention
from kimi_k3_npu.model.mla import MultiHeadLatentAttention
from kimi_k3_npu.model.mlp import MLP
from kimi_k3_npu.model.moe import LatentMoE, Router
from kimi_k3_npu.ops.routing import route

if TYPE_CHECKING:
    from tests.conftest import Oracle

TOLERANCE = 5e-4
#: What a wrong model must differ by, in logits between -5 and 5. The smallest here moves them by 2.9.
FAR = 1.0


class Mutant:
    """A shared model and parts of its code, changed until the test ends."""

    def __init__(self, model: KimiK3ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self._monkeypatch = model, monkeypatch

    def each(self, kind: type[nn.Module]) -> Iterator[Any]:
        return (module for module in self.model.modules() if isinstance(module, kind))

    def replace(self, target: Any, name: str, value: Any) -> None:
        """Replace an attribute of an object or class; what torch keeps in dictionaries of its own, in those."""
        for kept in ("_parameters", "_modules"):
            if name in getattr(target, kept, ()):
                self._monkeypatch.setitem(getattr(target, kept), name, value)
                return
        self._monkeypatch.setattr(target, name, value)

    def replace_function(self, where: str, value: Callable) -> None:
        self._monkeypatch.setattr(f"kimi_k3_npu.model.{where}", value)


MUTATIONS: list[Any] = []


def mutation(name: str, oracle: str = "k3") -> Callable[[Callable[[Mutant], None]], Callable[[Mutant], None]]:
    def add(change: Callable[[Mutant], None]) -> Callable[[Mutant], None]:
        MUTATIONS.append(pytest.param(oracle, change, id=name))
        return change

    return add


@mutation("softplus decay in place of the bounded one")
def _(m: Mutant) -> None:
    for layer in m.each(KimiDeltaAttention):
        m.replace(layer, "gate_lower_bound", None)


@mutation("bounded decay in place of softplus", "kimi-linear")
def _(m: Mutant) -> None:
    for layer in m.each(KimiDeltaAttention):
        m.replace(layer, "gate_lower_bound", -5.0)


@mutation("softplus decay clamped at the bound")
def _(m: Mutant) -> None:
    def clamped(f: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
        return (-A_log.exp().unsqueeze(-1) * F.softplus(f + dt_bias)).clamp(min=lower_bound)

    m.replace_function("delta_rule.kda_gate", clamped)


@mutation("A_log of the next head")
def _(m: Mutant) -> None:
    for layer in m.each(KimiDeltaAttention):
        m.replace(layer, "A_log", nn.Parameter(layer.A_log.roll(1), requires_grad=False))


@mutation("A_log from the zeros after the heads")
def _(m: Mutant) -> None:
    for layer in m.each(KimiDeltaAttention):
        m.replace(layer, "A_log", nn.Parameter(torch.zeros_like(layer.A_log), requires_grad=False))


@mutation("A_log unsliced: one value per channel, as long as a head is wide")
def _(m: Mutant) -> None:
    def per_channel(f: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
        published = F.pad(A_log, (0, f.shape[-1] - len(A_log)))
        return lower_bound * torch.sigmoid(published.exp() * (f + dt_bias))

    m.replace_function("delta_rule.kda_gate", per_channel)


@mutation("no output gate after KDA")
def _(m: Mutant) -> None:
    def ungated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    m.replace_function("kda.gated_rms_norm", ungated)


@mutation("no output gate after MLA")
def _(m: Mutant) -> None:
    for layer in m.each(MultiHeadLatentAttention):
        m.replace(layer, "has_gate", False)


@mutation("RoPE on the part that is named for it")
def _(m: Mutant) -> None:
    mla = CachedAttention.mla

    def turned(attention: CachedAttention, x: Tensor) -> Tensor:  # [T, ..., r]
        spans = zip(attention.kv_lens, attention.query_lens, strict=True)
        positions = torch.cat([torch.arange(end - n, end) for end, n in spans])
        half = x.shape[-1] // 2
        angles = positions.view(-1, *[1] * (x.ndim - 1)) * 10000.0 ** -(torch.arange(half) / half)
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def turned_mla(self: CachedAttention, layer: Any, q: Tensor, kv: Tensor, k_rope: Tensor) -> Tensor:
        q = torch.cat([q[..., : layer.n], turned(self, q[..., layer.n :])], dim=-1)
        return mla(self, layer, q, kv, turned(self, k_rope))

    m.replace(CachedAttention, "mla", turned_mla)


@mutation("a mixture of normed rows")
def _(m: Mutant) -> None:
    def normed(prefix: Tensor, bank: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = F.rms_norm(torch.cat([bank, prefix.unsqueeze(1)], dim=1), weight.shape, eps=eps)
        return ((rows @ weight).softmax(dim=-1).unsqueeze(1) @ rows).squeeze(1)

    m.replace_function("residual.mix_residuals", normed)


@mutation("scores from the raw rows")
def _(m: Mutant) -> None:
    def raw(prefix: Tensor, bank: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = torch.cat([bank, prefix.unsqueeze(1)], dim=1)
        return ((rows @ weight).softmax(dim=-1).unsqueeze(1) @ rows).squeeze(1)

    m.replace_function("residual.mix_residuals", raw)


@mutation("the mixture in the bank in place of the raw sum")
def _(m: Mutant) -> None:
    forward = DecoderLayer.forward

    def stores_mixture(self: DecoderLayer, prefix: Tensor, bank: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        after, grown = forward(self, prefix, bank, *rest)
        if self.starts_block and bank.shape[1]:
            assert self.self_attention_res is not None
            grown = torch.cat([bank, self.self_attention_res(prefix, bank).unsqueeze(1)], dim=1)
        return after, grown

    m.replace(DecoderLayer, "forward", stores_mixture)


@mutation("blocks counted from layer 1")
def _(m: Mutant) -> None:
    for i, layer in enumerate(m.each(DecoderLayer), start=1):
        m.replace(layer, "starts_block", i % m.model.config.text.attn_res_block_size == 0)


class ReplacedExperts(nn.Module):
    """The routed experts with a norm where it does not belong: inside the sum over `parts` of them."""

    def __init__(self, moe: LatentMoE, parts: Callable[[Tensor], Sequence[Tensor]]) -> None:
        super().__init__()
        self.experts, self.norm, self.parts = moe.experts, moe.routed_expert_norm, parts

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return sum((self.norm(self.experts(x, weights * part, ids)) for part in self.parts(ids)), torch.zeros_like(x))


def norm_inside(m: Mutant, parts: Callable[[Tensor], Sequence[Tensor]]) -> None:
    for moe in m.each(LatentMoE):
        m.replace(moe, "experts", ReplacedExperts(moe, parts))
        m.replace(moe, "routed_expert_norm", None)


@mutation("each expert normed before the sum")
def _(m: Mutant) -> None:
    norm_inside(m, lambda ids: F.one_hot(torch.arange(ids.shape[1])).bool())


@mutation("each rank's share normed before the sum over two ranks")
def _(m: Mutant) -> None:
    half = m.model.config.text.num_experts // 2
    norm_inside(m, lambda ids: (ids < half, ids >= half))


@mutation("no norm after the expert sum")
def _(m: Mutant) -> None:
    for moe in m.each(LatentMoE):
        m.replace(moe, "routed_expert_norm", None)


@mutation("no shared experts")
def _(m: Mutant) -> None:
    for moe in m.each(LatentMoE):
        m.replace(moe, "shared_experts", None)


@mutation("router weights with the bias in them")
def _(m: Mutant) -> None:
    def biased(logits: Tensor, bias: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        _, ids = route(logits, bias, *options)
        weights = (logits.sigmoid() + bias).gather(1, ids.long())
        return weights / weights.sum(dim=-1, keepdim=True), ids

    m.replace_function("moe.route", biased)


@mutation("experts picked without the bias")
def _(m: Mutant) -> None:
    for router in m.each(Router):
        m.replace(router, "bias", nn.Parameter(torch.zeros_like(router.bias), requires_grad=False))


def configure_routers(m: Mutant, **changes: Any) -> None:
    for router in m.each(Router):
        m.replace(router, "config", dataclasses.replace(router.config, **changes))


# K3 norms the expert sum, which takes back a factor common to a token's weights: only Kimi-Linear shows the next two.


@mutation("no renormalisation", "kimi-linear")
def _(m: Mutant) -> None:
    configure_routers(m, moe_renormalize=False)


@mutation("no scaling", "kimi-linear")
def _(m: Mutant) -> None:
    configure_routers(m, routed_scaling_factor=1.0)


@mutation("no expert groups", "k3-router")
def _(m: Mutant) -> None:
    configure_routers(m, num_expert_group=1, topk_group=1)


@mutation("softmax scores")
def _(m: Mutant) -> None:
    configure_routers(m, moe_router_activation_func="softmax")


@mutation("SiLU in place of SiTU")
def _(m: Mutant) -> None:
    set_betas(m, None, None)


@mutation("SiTU without its bound on the linear part")
def _(m: Mutant) -> None:
    set_betas(m, 4.0, None)


@mutation("SiTU with beta 1")
def _(m: Mutant) -> None:
    set_betas(m, 1.0, 25.0)


def set_betas(m: Mutant, beta: float | None, linear_beta: float | None) -> None:
    for mlp in m.each(MLP):
        m.replace(mlp, "beta", beta)
        m.replace(mlp, "linear_beta", linear_beta)
    for experts in m.each(Experts):
        m.replace(experts, "betas", (beta, linear_beta))


def distance(oracle: Oracle) -> float:
    """The largest difference of a logit from what is expected."""
    logits = oracle.model.score(oracle.expected.prompts)
    return max((a - e).abs().max().item() for a, e in zip(logits, oracle.expected.logits, strict=True))


@pytest.mark.parametrize(("name", "change"), MUTATIONS)
def test_an_oracle_notices(
    oracle: Callable[[str], Oracle],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    change: Callable[[Mutant], None],
) -> None:
    with monkeypatch.context() as patch:
        change(Mutant(oracle(name).model, patch))
        assert distance(oracle(name)) > FAR
    assert distance(oracle(name)) < TOLERANCE  # the shared model is itself again


def test_the_eps_of_the_latent_norms_is_a_small_thing(
    oracle: Callable[[str], Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines norm the latents with rms_norm_eps, 1e-5, where the published code has 1e-6. That moves these logits by
    7e-5: the oracles cannot tell the two apart, so the eps itself is looked at."""
    k3 = oracle("k3")
    before = k3.model.score(k3.expected.prompts)
    for layer in Mutant(k3.model, monkeypatch).each(MultiHeadLatentAttention):
        for norm in (layer.q_a_layernorm, layer.kv_a_layernorm):
            assert norm.eps == 1e-6
            monkeypatch.setattr(norm, "eps", 1e-5)
    after = k3.model.score(k3.expected.prompts)
    moved = max((a - b).abs().max().item() for a, b in zip(after, before, strict=True))
    assert 0 < moved < TOLERANCE


def test_layer_lists_counted_from_0_are_refused(oracle: Callable[[str], Oracle]) -> None:
    raw = json.loads((oracle("k3").folder / "config.json").read_text())
    lists = raw["text_config"]["linear_attn_config"]
    for name in ("kda_layers", "full_attn_layers"):
        lists[name] = [layer - 1 for layer in lists[name]]
    wanted = r"outside the model: \[0\]; in neither list: \[9\]. kda_layers and full_attn_layers are 1-based"
    with pytest.raises(ConfigError, match=wanted):
        KimiK3Config.from_hf(raw)


def test_layer_lists_that_are_shifted_do_not_fit_the_tensors(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    """A shift that is still a partition gives another model, whose tensors the checkpoint does not have."""
    folder = tmp_path / "shifted"
    shutil.copytree(oracle("k3").folder, folder)
    raw = json.loads((folder / "config.json").read_text())
    lists = raw["text_config"]["linear_attn_config"]
    layers = raw["text_config"]["num_hidden_layers"]
    for name in ("kda_layers", "full_attn_layers"):
        lists[name] = sorted(layer % layers + 1 for layer in lists[name])
    (folder / "config.json").write_text(json.dumps(raw))
    assert KimiK3Config.from_pretrained(folder).text.layer_kinds != oracle("k3").model.config.text.layer_kinds
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.q_a_proj\.weight") as error:
        load_model(folder)
    assert {fault.kind for fault in error.value.faults} == {"unknown tensor", "missing tensor"}
