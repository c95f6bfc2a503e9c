"""The dry run counts what is known by other means, for one rank and for many."""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.errors import LaunchError, LayoutError
from kimi_k3_npu.model.attention import CachedAttention
from kimi_k3_npu.ops.situ import situ_and_mul
from kimi_k3_npu.parallel.layout import ParallelLayout
from kimi_k3_npu.plan.dry_run import Pass, Rank, dry_run, hit_experts
from kimi_k3_npu.plan.hardware import CHIPS, bound, chip, missing
from kimi_k3_npu.plan.meter import Meter

RECIPE = ParallelLayout.parse("tp=64,dp=4,dispatch=alltoall,shared=attn_tp,dense=attn_tp,lm_head=dp")


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


class TestMeter:
    def test_matmul(self) -> None:
        x, w = empty(8, 16), empty(16, 32)
        with Meter()() as count:
            y = x @ w
        assert count.flops == 2 * 8 * 16 * 32
        assert count.bytes == 4 * (x.numel() + w.numel() + y.numel())
        assert count.launches == 1

    def test_views_are_free(self) -> None:
        with Meter()() as count:
            empty(8, 16).view(-1).unsqueeze(0).expand(3, -1).split(4, dim=1)
        assert (count.launches, count.bytes) == (0, 0)

    def test_an_operator_is_one_kernel(self) -> None:
        x = empty(8, 32)
        with Meter()() as count:
            y = situ_and_mul(x, 4.0, 25.0)
        assert list(count.kernels) == ["situ_and_mul"]
        assert count.bytes == 4 * (x.numel() + y.numel())

    def test_only_rows_of_a_table_are_read(self) -> None:
        table, ids = empty(1000, 16), torch.empty(4, dtype=torch.long, device="meta")
        with Meter()() as count:
            torch.nn.functional.embedding(ids, table)
        assert count.bytes == 2 * 4 * 16 * 4

    def test_weights_count_in_their_format_and_once(self) -> None:
        x, w = empty(8, 16), empty(32, 16)
        meter = Meter({w.untyped_storage()._cdata: 100})
        with meter() as count:
            first = torch.nn.functional.linear(x, w)
            second = torch.nn.functional.linear(x, w)
        assert count.weights == 100
        assert count.bytes == 2 * (100 + 4 * x.numel()) + 4 * (first.numel() + second.numel())

    def test_peak(self) -> None:
        x = empty(1024)
        with Meter()() as count:
            y = x + 1  # 4 KiB, alive
            z = y * 2  # 8 KiB
            del z
            z = y * 3  # again 8 KiB
        assert count.peak == 8192
        del y, z

    def test_inside_of_a_fused_operator_stays_on_the_chip(self) -> None:
        x = empty(1024, 64)
        with Meter()() as composed:
            situ_and_mul(x, 4.0, 25.0)
        with Meter(fused={"situ_and_mul"})() as fused:
            y = situ_and_mul(x, 4.0, 25.0)
        assert fused.peak == y.nbytes < composed.peak


class TestOneRank:
    def test_arithmetic_equals_a_real_pass(self, oracle: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
        """torch's own counter over tensors with numbers in them. Experts are counted as an even router would load
        them, which in sum is the same; but for rows that only fill up a product, which are left out here."""
        monkeypatch.setattr("kimi_k3_npu.ops.experts.ROWS", 1)
        model = oracle("k3").model
        cache = model.new_cache(1, 64)
        attention = CachedAttention(cache, [cache.join()], [32])
        ids = torch.zeros(32, dtype=torch.long)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            hidden = model(ids, attention)
            model.logits(hidden[:1])
        done = Rank(model.config, ParallelLayout(), "bf16").run("prefill", 1, 32, 32)
        text = model.config.text
        visits = sum(map(text.is_moe, range(text.num_hidden_layers))) * 32 * text.num_experts_per_token
        added_up = 2 * visits * text.expert_hidden_size  # a product here, where an NPU has an operator of its own
        assert done.count.flops == counter.get_total_flops() - added_up

    def test_all_weights_are_read_once(self, oracle: Callable) -> None:
        """Every parameter of the text model but the embedding, of which a pass reads rows; all experts by enough
        tokens."""
        config = oracle("k3").model.config
        rank = Rank(config, ParallelLayout(), "bf16")
        done = rank.run("prefill", 1, 512, 512)
        unread = ("vision_tower", "mm_projector", "embed_tokens", "w_uv")
        total = sum(held.total for path, held in rank.held.items() if not any(name in path for name in unread))
        assert done.count.weights == pytest.approx(total, rel=0.02)


@pytest.fixture(scope="module")
def passes(full: KimiK3Config) -> dict[str, Pass]:
    start = time.process_time()
    done = {
        one.name: one
        for one in dry_run(full, RECIPE, "w4a8", prefill=2048, decode=(16, 1), context=8192, own_model=False)
    }
    assert time.process_time() - start < 180
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 6e6  # KiB
    return done


class TestManyRanks:
    def test_every_layer_communicates(self, passes: dict[str, Pass], full: KimiK3Config) -> None:
        moe = len(full.text.moe_layers)
        assert Counter((c.op, c.axis, c.ranks) for c in passes["decode"].collectives) == {
            ("all-reduce", "attn_tp", 16): 93 + 1,  # attention of every layer, the dense MLP
            ("dispatch", "ep", 64): moe,
            ("combine", "ep", 64): moe,
            ("all-gather", "shared_experts_tp", 16): moe,
            ("reduce-scatter", "shared_experts_tp", 16): moe,
            ("all-gather", "attn_tp", 16): moe,
            ("all-reduce", "vocab", 16): 1,
            ("all-gather", "vocab", 16): 1,
        }

    def test_bytes_of_one_collective(self, passes: dict[str, Pass]) -> None:
        sent = {(c.op, c.axis): c.sent for c in passes["decode"].collectives}
        assert sent["all-reduce", "attn_tp"] == 2 * (16 * 7168 * 2 * 15 // 16)
        assert sent["dispatch", "ep"] == 1 * 16 * 3584 * 2 * 63 // 64  # one row of this rank, to its 16 experts

    def test_arithmetic_is_a_share_of_active_parameters(self, passes: dict[str, Pass]) -> None:
        """About 104e9 parameters for each of 8192 tokens, over 64 ranks, plus what is replicated and attention."""
        least = 2 * 104e9 * 4 * 2048 / 64
        assert least < passes["prefill"].count.flops < 1.2 * least

    def test_memory_traffic(self, passes: dict[str, Pass]) -> None:
        decode = passes["decode"]
        assert decode.kv == 27_648 * 16 * 8193
        assert decode.states == pytest.approx(2 * 16 * 28.1e6, rel=1e-2)
        # Of 14 experts a rank, 16 rows that go anywhere hit 9.7.
        assert 13e9 + 92 * 9.7 * 16.6e6 < decode.count.weights < 14.2e9 + 92 * 9.8 * 16.7e6
        assert passes["prefill"].count.weights > decode.count.weights

    def test_a_sample_is_about_the_whole(self, full: KimiK3Config, passes: dict[str, Pass]) -> None:
        sample = Rank(full, RECIPE, "w4a8", own_model=False).sample("decode", 16, 1, 8192)
        for field in ("compulsory", "sent"):
            assert getattr(sample, field) == pytest.approx(getattr(passes["decode"], field), rel=0.06)
        assert sample.count.flops == pytest.approx(passes["decode"].count.flops, rel=0.02)

    @pytest.mark.parametrize(
        ("layout", "axes"),
        [
            ("tp=64,dp=4,ep=64", {"dp", "attn_tp", "vocab"}),
            ("tp=8,ep=8,pp=2", {"attn_tp", "vocab"}),
            ("tp=64,dp=8,dispatch=mc2,shared=4,lm_head=dp", {"attn_tp", "dp", "ep", "shared_experts_tp", "vocab"}),
        ],
    )
    def test_other_layouts(self, full: KimiK3Config, layout: str, axes: set[str]) -> None:
        (done,) = dry_run(full, ParallelLayout.parse(layout), "w4a8", prefill=0, decode=(2, 1), context=256)
        assert {collective.axis for collective in done.collectives} <= axes | {"tp", "dense_mlp_tp"}
        assert done.count.weights > 0

    @pytest.mark.slow
    def test_stages_make_the_whole(self, full: KimiK3Config) -> None:
        whole = Rank(full, ParallelLayout.parse("tp=16,ep=16"), "bf16").run("decode", 2, 1, 256)
        layout = ParallelLayout.parse("tp=16,ep=16,pp=4")
        parts = [Rank(full, layout, "bf16", 16 * stage).run("decode", 2, 1, 256) for stage in range(4)]
        for field in ("kv", "states", "sent"):
            assert sum(getattr(part, field) for part in parts) == getattr(whole, field)
        assert sum(part.count.flops for part in parts) == whole.count.flops
        assert sum(part.count.weights for part in parts) == whole.count.weights

    def test_a_layout_that_cannot_be(self, full: KimiK3Config) -> None:
        with pytest.raises(LayoutError, match="does not split over"):
            dry_run(full, ParallelLayout(tp=64), "w4a8", prefill=0, decode=(1, 1), context=128)


def test_hit_experts() -> None:
    assert hit_experts(0, 14) == 0
    assert hit_experts(1, 14) == pytest.approx(1)
    assert hit_experts(10_000, 14) == pytest.approx(14)


class TestHardware:
    def test_bound(self, passes: dict[str, Pass]) -> None:
        done = passes["decode"]
        die = chip("a3", None, {})
        least = bound(die, done)
        assert least.memory == pytest.approx(done.compulsory / 1.6e12)
        assert least.seconds == max(least.memory, least.compute, least.link)
        slower = bound(chip("a3", None, {"memory_bandwidth": 0.8}), done)
        assert slower.memory == pytest.approx(2 * least.memory)
        assert "given by the user" in slower.sources

    @pytest.mark.slow
    def test_below_what_was_measured(self, full: KimiK3Config) -> None:
        """8K in, 1K out, drafts of 7: 15.2 ms a token for one request at a time, of which a step gives up to 8."""
        (done,) = dry_run(full, RECIPE, "w4a8", prefill=0, decode=(1, 8), context=9216)
        assert bound(chip("a3", None, {}), done).seconds / 8 < 15.2e-3

    def test_unpublished_figures_are_asked_for(self, passes: dict[str, Pass]) -> None:
        done = passes["decode"]
        with pytest.raises(
            LaunchError, match=r"910b: no public source .* --memory-tbps \(such as 1\.6\), --bf16-tflops"
        ):
            bound(chip("a2", None, {}), done)
        given: dict[str, Any] = {"memory_bandwidth": 1.6, "bf16": 350, "link": 25}
        assert bound(chip("a2", None, given), done).seconds > 0

    def test_every_number_has_a_source(self) -> None:
        for die in CHIPS:
            for number in (die.memory_bandwidth, die.bf16, die.int8, die.link):
                assert (number.value is None) == (number.source == "not published")
        assert not missing(chip("a3", None, {}))
        with pytest.raises(LaunchError, match="no chip 910b for soc a3 in the hardware table"):
            chip("a3", "910b", {})
