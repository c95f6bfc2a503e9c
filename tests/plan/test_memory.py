"""What fits: cache bytes from the cache's own pools, activations from real passes, budgets as the engines make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.model.attention import CachedAttention
from kimi_k3_npu.ops.device import Device, parse_cann
from kimi_k3_npu.parallel.layout import ParallelLayout
from kimi_k3_npu.parallel.mesh import Mesh
from kimi_k3_npu.plan.dry_run import Rank
from kimi_k3_npu.plan.memory import GIB, MEGABYTE, cache_bytes, memory, pass_need
from kimi_k3_npu.recipes.serving import Serving

A3 = Device("a3", parse_cann("9.0"), frozenset({"sgl_kernel_npu"}))
RECIPE = "tp=64,dp=4,dispatch=alltoall,shared=attn_tp,dense=attn_tp,lm_head=dp"


def mesh(text: str, rank: int = 0) -> Mesh:
    return Mesh.inspect(ParallelLayout.parse(text), rank)


class TestCache:
    def test_published(self, full: KimiK3Config) -> None:
        kv, state = cache_bytes(full, mesh(RECIPE))
        assert kv == 27_648
        assert round(state / 1e6, 1) == 28.1
        assert round(cache_bytes(full, mesh("tp=8"))[1] / 1e6, 1) == 56.2
        assert round(cache_bytes(full, mesh("tp=32"))[1] / 1e6, 1) == 14.0
        assert round(cache_bytes(full, mesh("tp=1"))[1] / 1e6) == 449

    def test_stages_share_it_out(self, full: KimiK3Config) -> None:
        stages = [cache_bytes(full, mesh("tp=16,pp=4", 16 * stage)) for stage in range(4)]
        assert tuple(map(sum, zip(*stages, strict=True))) == cache_bytes(full, mesh("tp=16"))


class TestActivations:
    def test_against_what_torch_allocates(self, oracle: Callable) -> None:
        """The peak that is counted on the meta device is the sum of the results that are alive at the worst moment."""
        config = oracle("k3").model.config
        rank = Rank(config, ParallelLayout(), "bf16")
        one, two = (rank.peak(tokens, frozenset())[0] for tokens in (256, 512))
        assert 1.5 < two / one < 4.5  # grows with the tokens, and attention's scores with their square

    def test_bank_is_in_it(self, full: KimiK3Config) -> None:
        need = pass_need(Rank(full, ParallelLayout.parse(RECIPE), "bf16"), 2048, A3)
        assert need.activations > 9 * 2048 * 7168 * 2

    def test_fused_kernels_need_less(self, full: KimiK3Config) -> None:
        rank = Rank(full, ParallelLayout.parse(RECIPE), "bf16")
        assert pass_need(rank, 2048, A3).activations < pass_need(rank, 2048).activations / 2

    def test_communicators(self, full: KimiK3Config) -> None:
        for text, sizes in ((RECIPE, [16, 64]), ("tp=48", [48]), ("tp=64,dp=4,ep=64", [4, 16, 64])):
            groups = pass_need(Rank(full, ParallelLayout.parse(text), "bf16"), 256).groups
            assert sorted(map(len, groups)) == sizes


class TestBudget:
    @pytest.fixture
    def serving(self, subject: Callable) -> Serving:
        return subject("sglang-a3-4node-dspark").serving

    def test_sglang(self, full: KimiK3Config, serving: Serving) -> None:
        """Weights and pools share the fraction; everything else has the rest."""
        of = memory(full, serving, "w4a8", total=64 * GIB, device=A3)
        assert of.pools == int(64 * GIB * 0.72) - of.weight_bytes
        assert of.outside == 64 * GIB - int(64 * GIB * 0.72)
        assert of.buffers == 2 * 2 * 2000 * MEGABYTE
        assert of.slots == 16 * (5 + 8)
        assert of.tokens == (of.pools - of.slots * of.state_per_slot) // 27_648
        assert not of.short

    def test_vllm(self, full: KimiK3Config, serving: Serving) -> None:
        """Everything shares the fraction."""
        sglang = memory(full, serving, "w4a8", total=64 * GIB, device=A3)
        vllm = memory(full, replace(serving, fraction_covers_all=True), "w4a8", total=64 * GIB, device=A3)
        assert vllm.pools == sglang.pools - sglang.buffers - sglang.activations
        assert vllm.outside is None

    def test_requests_of_a_context(self, full: KimiK3Config, serving: Serving) -> None:
        of = memory(full, serving, "w4a8", total=64 * GIB, device=A3)
        context = 100_000
        room = of.requests_of(context)
        each = context * of.kv_per_token + 13 * of.state_per_slot
        assert room * each <= of.pools < (room + 1) * each

    def test_shortage(self, full: KimiK3Config, serving: Serving) -> None:
        of = memory(full, serving, "w4a8", total=46 * GIB, device=A3)
        assert of.short > 0
        assert of.short == 13 * of.state_per_slot + 128 * of.kv_per_token - of.pools
        tight = memory(full, replace(serving, memory_fraction=0.97), "w4a8", total=64 * GIB, device=A3)
        assert tight.short == tight.buffers + tight.activations - (tight.outside or 0)

    def test_a_draft_takes_its_share(self, full: KimiK3Config, serving: Serving) -> None:
        plain, drafted = (memory(full, serving, "w4a8", total=64 * GIB, extra_weights=x) for x in (0, 10**9))
        assert plain.pools - drafted.pools == 10**9


def test_a_real_pass_runs_at_the_shapes_of_the_plan(oracle: Callable) -> None:
    """The same call on tensors with memory: the dry run is no other code."""
    model = oracle("k3").model
    cache = model.new_cache(2, 64)
    attention = CachedAttention(cache, [cache.join(), cache.join()], [3, 3])
    hidden = model(torch.zeros(6, dtype=torch.long), attention)
    rank = Rank(model.config, ParallelLayout(), "bf16")
    done = rank.run("prefill", 2, 3, 3)
    assert hidden.shape == (6, model.config.text.hidden_size)
    assert done.tokens == 6
