"""Each check is tripped by a launch, and by none of those that come with the package but those that say so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.parallel.layout import ParallelLayout
from kimi_k3_npu.plan.checks import CHECKS, check_launch
from kimi_k3_npu.plan.finding import Finding
from kimi_k3_npu.plan.subject import Subject
from kimi_k3_npu.recipes.launch import all_launches, example_inputs
from kimi_k3_npu.recipes.reader import load_recipe, recipe_names
from kimi_k3_npu.recipes.schema import Setting

SGLANG, DRAFTED, VLLM = "sglang-a3-4node", "sglang-a3-4node-dspark", "vllm-a3-4node"
Findings = Callable[..., list[Finding]]


def one(findings: list[Finding], check: str, level: str = "error") -> Finding:
    """The only finding of a check."""
    (found,) = [finding for finding in findings if finding.check == check]
    assert found.level == level
    return found


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_have_no_errors(full: KimiK3Config, name: str) -> None:
    """On every node; what a recipe admits to is a note, and only unverified ones admit to anything."""
    recipe = load_recipe(name)
    if recipe.hardware.soc == "cpu":
        from kimi_k3_npu.tiny import tiny_config

        full = KimiK3Config.from_hf(tiny_config())
    for launch in all_launches(recipe, example_inputs(recipe)):
        found = check_launch(Subject(launch, full, deep=launch.rank == 0))
        assert not [str(finding) for finding in found if finding.level == "error"]
        known = {finding.check for finding in found if finding.fix.startswith("known: ")}
        assert known <= set(recipe.known_problems)
        if launch.rank == 0 and launch.role.nodes:
            assert known == set(recipe.known_problems)


class TestFlags:
    def test_former_flag(self, subject: Callable[..., Subject]) -> None:
        process = subject(SGLANG)
        flags = {**process.launch.flags, "--cuda-graph-bs": Setting([1, 4], "", "x")}
        process.launch = replace(process.launch, flags=flags)
        found = one(check_launch(process), "dead-flag")
        assert "--cuda-graph-bs has gone from sglang" in found.text
        assert found.fix == "use --cuda-graph-bs-decode"

    def test_misspelt_flag(self, subject: Callable[..., Subject]) -> None:
        process = subject(SGLANG)
        flags = {**process.launch.flags, "--enable-shared-expert-attn-tp": Setting(True, "", "x")}
        process.launch = replace(process.launch, flags=flags)
        found = one(check_launch(process), "unknown-flag")
        assert found.fix.startswith("did you mean --enable-shared-experts-attn-tp")

    def test_fuseep_mode_3(self, findings: Findings) -> None:
        found = one(findings(SGLANG, fuseep_mode="3"), "flag-value")
        assert found.text == "--fuseep-mode 3 is not a choice; choices: 1, 2"

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"moe_a2a_backend": "depep"}, "--moe-a2a-backend depep is not a choice"),
            ({"tp_size": "off", "max_running_requests": "off"}, ""),
        ],
    )
    def test_values(self, findings: Findings, changes: dict[str, str], text: str) -> None:
        found = [finding.text for finding in findings(SGLANG, **changes) if finding.check == "flag-value"]
        assert any(text in one for one in found) if text else not found

    def test_switch_with_a_value(self, subject: Callable[..., Subject]) -> None:
        process = subject(SGLANG)
        flags = {**process.launch.flags, "--disable-radix-cache": Setting("yes", "", "x")}
        process.launch = replace(process.launch, flags=flags)
        assert one(check_launch(process), "flag-value").text == "--disable-radix-cache takes no value"


class TestVariables:
    def with_variable(self, process: Subject, name: str, value: str = "1") -> Subject:
        environment = {**process.launch.environment, name: Setting(value, "", "x")}
        process.launch = replace(process.launch, environment=environment)
        return process

    def test_former_name_instead_of_the_option(self, subject: Callable[..., Subject]) -> None:
        """With SGLang's own model nothing reads it, and every rank holds the shared experts whole."""
        process = subject(SGLANG, enable_shared_experts_attn_tp="off", model_impl="auto")
        found = one(check_launch(self.with_variable(process, "SGLANG_K3_SHARED_EXPERTS_ATTN_TP")), "dead-variable")
        assert found.text.endswith("is not read by sglang-0.5.23, so nothing is split")
        assert found.fix == "use --enable-shared-experts-attn-tp"

    def test_former_name_that_this_package_reads(self, subject: Callable[..., Subject]) -> None:
        process = subject(SGLANG, enable_shared_experts_attn_tp="off")
        found = check_launch(self.with_variable(process, "SGLANG_K3_SHARED_EXPERTS_ATTN_TP"))
        assert "only this package reads" in one(found, "dead-variable", "warning").text

    def test_former_name_beside_the_option(self, subject: Callable[..., Subject]) -> None:
        found = check_launch(self.with_variable(subject(SGLANG), "SGLANG_K3_DENSE_MLP_ATTN_TP"))
        assert one(found, "dead-variable", "warning").fix.startswith("--enable-dense-mlp-attn-tp does it")

    @pytest.mark.parametrize(
        ("name", "check", "fix"),
        [
            ("SGLANG_ENABLE_SPEC_V2", "dead-variable", "leave it out"),
            ("SGLANG_SET_CPU_AFINITY", "dead-variable", "did you mean SGLANG_SET_CPU_AFFINITY"),
            ("HCCL_BUFFERSIZE", "unknown-variable", "did you mean HCCL_BUFFSIZE"),
        ],
    )
    def test_misspelt(self, subject: Callable[..., Subject], name: str, check: str, fix: str) -> None:
        found = one(check_launch(self.with_variable(subject(SGLANG), name)), check, "warning")
        assert found.fix.startswith(fix)

    def test_vllm(self, subject: Callable[..., Subject]) -> None:
        assert one(check_launch(self.with_variable(subject(VLLM), "VLLM_USE_V1")), "dead-variable", "warning")
        assert not check_launch(self.with_variable(subject(VLLM), "VLLM_ASCEND_ENABLE_MLAPO"))


class TestLayout:
    def test_divisibility(self, findings: Findings) -> None:
        found = one(findings(SGLANG, dp_size="1"), "layout")
        assert found.text.startswith("96 attention heads do not split over attn_tp = 64")
        assert "that work" in found.text

    def test_whole_experts(self, findings: Findings) -> None:
        found = one(findings(SGLANG, tp_size="48", dp_size="2"), "layout")
        assert "896 experts" in found.text

    def test_shared_size(self, findings: Findings) -> None:
        found = one(findings(SGLANG, shared_experts_tp_size="5"), "layout")
        assert "sizes that do: 1, 2, 4, 8, 16" in found.text

    def test_shared_option_without_an_all_to_all(self, findings: Findings) -> None:
        found = one(findings(SGLANG, moe_a2a_backend="none", ep_size="64"), "option-ignored")
        assert found.fix == "use --moe-a2a-backend deepep, or leave the option out"

    def test_dense_option_with_one_replica(self, findings: Findings) -> None:
        found = findings("sglang-a3-3node", enable_dense_mlp_attn_tp="on")
        assert "changes nothing with dp = 1" in one(found, "option-ignored", "warning").text

    def test_ranks_and_dies(self, findings: Findings) -> None:
        assert one(findings(SGLANG, tp_size="32"), "devices").text == "the flags make 32 ranks, serve has 64 dies"


class TestExperts:
    def test_one_a_rank(self, subject: Callable[..., Subject]) -> None:
        process = subject(SGLANG)
        layout = ParallelLayout(tp=896, dp=28, ep=896, moe_dispatch="alltoall", enable_dense_mlp_attn_tp=True)
        process.given = replace(process.serving, layout=layout)
        process.__dict__.pop("serving")
        assert "one expert a rank" in one(check_launch(process), "experts-per-rank").text

    def test_fused_dispatch(self, findings: Findings) -> None:
        found = findings(SGLANG, moe_a2a_backend="ascend_fuseep", model_impl="auto")
        assert "does not pass SiTU's betas" in one(found, "expert-function").text
        assert "14 experts a rank" in one(found, "experts-per-rank", "warning").text

    def test_swiglu_without_an_all_to_all(self, findings: Findings) -> None:
        found = one(findings("sglang-a3-3node", model_impl="auto"), "expert-function")
        assert "SwiGLU, not SiTU" in found.text
        assert not [finding for finding in findings("sglang-a3-3node") if finding.check == "expert-function"]

    @pytest.mark.parametrize(
        ("recipe", "form", "reason", "fix"),
        [
            (SGLANG, "mxfp4", "a3 has no FP4 hardware", "convert it: kimi-k3-npu weights convert --to int4x2"),
            ("vllm-a2-8node", "mxfp4", "a2 has no FP4 hardware", "use a W4A8 checkpoint"),
            ("sglang-a5-4node", "w4a8", "laid out for a2 and a3", "use the published MXFP4 checkpoint"),
        ],
    )
    def test_format(self, subject: Callable[..., Subject], recipe: str, form: str, reason: str, fix: str) -> None:
        process = subject(recipe)
        checkpoint = replace(process.launch.recipe.checkpoint, format=form)
        process.launch = replace(process.launch, recipe=replace(process.launch.recipe, checkpoint=checkpoint))
        found = one(check_launch(process), "format-on-soc")
        assert reason in found.text
        assert fix in found.fix


class TestPasses:
    def test_mc2(self, subject: Callable[..., Subject]) -> None:
        process = subject(SGLANG)
        layout = ParallelLayout.parse("tp=64,dp=4,dispatch=mc2")
        process.given = replace(process.serving, layout=layout, requests=16 * 600, buffer_mb=4000)
        process.__dict__.pop("serving")
        assert "600 rows on a rank, must be in 1..512" in one(check_launch(process), "mc2").text

    def test_mc2_of_vllm(self, findings: Findings) -> None:
        changes = {"max_num_seqs": "600", "additional_config": "{}"}
        found = one(findings(VLLM, **changes), "mc2", "warning")
        assert "600 rows on a rank, MC2 takes 512" in found.text
        assert not [finding for finding in findings(VLLM, max_num_seqs="600") if finding.check == "mc2"]

    def test_deepep_capacity(self, findings: Findings) -> None:
        found = one(findings(DRAFTED, max_running_requests="128"), "deepep-capacity")
        assert "32 requests x 8 rows = 256 in a decode step" in found.text
        assert found.fix == "set SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=256"
        found = one(findings(DRAFTED, speculative_dspark_block_size="15"), "deepep-capacity")
        assert "16 requests x 16 rows = 256" in found.text
        many = findings(DRAFTED, SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK="2048")
        assert one(many, "deepep-capacity").text.endswith("=2048, at most 1024")

    def test_deepep_rounds(self, findings: Findings) -> None:
        round_, tokens = "DEEPEP_NORMAL_LONG_SEQ_ROUND", "DEEPEP_NORMAL_LONG_SEQ_PER_ROUND_TOKENS"
        found = one(findings(SGLANG, **{round_: "256", tokens: "1024"}), "deepep-rounds")
        assert found.text == "256 rounds x 1024 tokens = 262144, at most 131072"
        assert "is outside 1..256" in one(findings(SGLANG, **{round_: "300", tokens: "32"}), "deepep-rounds").text
        found = one(findings(SGLANG, **{round_: "2", tokens: "512"}), "deepep-rounds")
        assert found.text == "a prefill pass of 4096 tokens a replica needs more than 2 rounds of 512"

    def test_chunk(self, findings: Findings) -> None:
        changes = {"chunked_prefill_size": str(4 * 65536), "DEEPEP_NORMAL_LONG_SEQ_PER_ROUND_TOKENS": "2048"}
        found = one(findings(SGLANG, model_impl="auto", **changes), "chunk")
        assert "a prefill pass of 65536 tokens" in found.text
        own = findings(SGLANG, **changes)
        assert not [finding for finding in own if finding.check == "chunk"]
        assert not [finding for finding in own if finding.check == "kernels"]
        huge = one(findings(SGLANG, chunked_prefill_size=str(1 << 23)), "kernels", "warning")
        assert huge.text.startswith(
            "causal_attention of 2097152 tokens falls back to composed: 2097152 tokens, at most"
        )

    def test_graphs(self, findings: Findings) -> None:
        found = one(findings(SGLANG, cuda_graph_bs_decode="2 4"), "graphs", "warning")
        assert found.text == "16 requests a replica, graphs up to 4: larger steps run without"

    def test_verification(self, findings: Findings) -> None:
        found = one(findings(DRAFTED, linear_attn_verify_backend="off"), "verify-backend")
        assert found.fix == "use --linear-attn-verify-backend triton"

    def test_aiv(self, findings: Findings) -> None:
        assert one(findings("vllm-a2-8node", HCCL_OP_EXPANSION_MODE="AIV"), "aiv")


class TestFit:
    def test_shared_experts_whole_do_not_fit(self, findings: Findings) -> None:
        """bf16 shared experts on every rank: by how much, and what would fit."""
        changes = {"enable_shared_experts_attn_tp": "off", "mem_fraction_static": "0.65", "disable_radix_cache": "on"}
        found = one(findings(DRAFTED, deep=True, **changes), "memory")
        assert "19.7 GB a die do not fit (weights 64.1" in found.text
        assert found.fix.startswith("nearest layout that fits: tp=64,dp=4,ep=64,dispatch=alltoall,shared=attn_tp")

    @pytest.mark.slow
    def test_nothing_fits(self, findings: Findings) -> None:
        found = one(findings(SGLANG, deep=True, mem_fraction_static="0.3"), "memory")
        assert found.fix == "no layout over these dies fits; use more nodes"

    @pytest.mark.slow
    def test_outside_of_the_pools(self, findings: Findings) -> None:
        found = one(findings(DRAFTED, deep=True, mem_fraction_static="0.9"), "memory")
        assert "buffers 8.4" in found.text

    def test_state_slots(self, findings: Findings) -> None:
        found = one(findings(SGLANG, deep=True), "state-slots", "warning")
        assert found.text == "16 state slots of a replica hold 3 requests of 5 slots, not 16"

    def test_no_room_for_tokens(self, findings: Findings) -> None:
        found = one(findings("sglang-a3-2p4d", "prefill", deep=True), "cache", "warning")
        assert found.text.startswith("40 state slots leave 2004 tokens of cache, a pass has 2048")

    def test_context(self, findings: Findings) -> None:
        found = one(findings(VLLM, deep=True, max_model_len="1000000"), "context")
        assert "one request of 1000000 tokens does not fit" in found.text
        assert one(findings(SGLANG, deep=True), "context", "note").fix == "give --context-length"

    def test_a_million_tokens(self, findings: Findings) -> None:
        found = one(findings(VLLM, max_model_len="1048576"), "context-nodes")
        assert found.text == "1048576 tokens of context on 4 nodes"
        eight = findings("vllm-a3-8node-1m", deep=True)
        assert not [finding for finding in eight if finding.level != "note"]

    def test_draft(self, subject: Callable[..., Subject]) -> None:
        assert one(check_launch(subject(DRAFTED)), "draft", "note")
        process = subject(DRAFTED)
        process.extra_weights = 10**9
        assert not check_launch(process)


class TestTransfer:
    def changed(self, process: Subject, role: str, flag: str, value: object) -> list[Finding]:
        """What is found when a role of the recipe has another value of a flag."""
        recipe = process.launch.recipe
        setting = Setting(value, "", "x")  # type: ignore[arg-type]
        roles = {**recipe.roles, role: replace(recipe.roles[role], flags={**recipe.roles[role].flags, flag: setting})}
        launch = replace(process.launch, recipe=replace(recipe, roles=roles), role=roles[process.launch.role.name])
        if role == launch.role.name:
            launch = replace(launch, flags={**launch.flags, flag: setting})
        process.launch = launch
        return check_launch(process)

    def test_cache_mode(self, subject: Callable[..., Subject]) -> None:
        found = self.changed(subject("vllm-a3-4p4d", "prefill"), "decode", "--mamba-cache-mode", "none")
        assert one(found, "transfer").text == "--mamba-cache-mode is align here and none in decode"

    @pytest.mark.parametrize(
        ("port", "text"), [(36200, "must be a number in quotes"), ("30000", "takes the ports up to 36000")]
    )
    def test_port(self, subject: Callable[..., Subject], port: object, text: str) -> None:
        process = subject("vllm-a3-4p4d", "decode")
        config = {**process.launch.flag("--kv-transfer-config"), "kv_port": port}
        assert text in one(self.changed(process, "decode", "--kv-transfer-config", config), "transfer").text

    def test_sizes(self, subject: Callable[..., Subject]) -> None:
        process = subject("vllm-a3-4p4d", "decode")
        sizes = {"prefill": {"dp_size": 2, "tp_size": 16}, "decode": {"dp_size": 4, "tp_size": 16}}
        config = {**process.launch.flag("--kv-transfer-config"), "kv_connector_extra_config": sizes}
        found = one(self.changed(process, "decode", "--kv-transfer-config", config), "transfer")
        assert "says prefill has {'dp_size': 2, 'tp_size': 16}, it has {'dp_size': 4, 'tp_size': 16}" in found.text


def test_every_check_says_what_it_looks_at() -> None:
    assert all(check.__doc__ for check in CHECKS)
