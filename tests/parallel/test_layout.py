"""The parallel layout: what it refuses and in which words, what it warns of, its text, and which ranks it groups."""

from __future__ import annotations

import re
import warnings
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3_npu.config import MXFP4_GROUP, TextConfig
from kimi_k3_npu.config.published import published_config
from kimi_k3_npu.errors import IgnoredOptionError, LayoutError
from kimi_k3_npu.parallel.layout import FORMER_VARIABLES, AxisName, ParallelLayout

SHARED, DENSE = FORMER_VARIABLES


@pytest.fixture(scope="module")
def k3() -> TextConfig:
    """The published Kimi-K3."""
    return published_config().text


def refused(config: TextConfig, layout: str, *, group: int = MXFP4_GROUP) -> str:
    """The message with which `layout` is refused for the model."""
    with pytest.raises(LayoutError) as error:
        ParallelLayout.parse(layout).check(config, expert_group=group)
    return str(error.value)


def is_legal(config: TextConfig, layout: str, *, group: int = MXFP4_GROUP) -> bool:
    try:
        ParallelLayout.parse(layout).check(config, expert_group=group)
    except LayoutError:
        return False
    return True


# What the model's sizes allow.


def test_heads(k3: TextConfig) -> None:
    assert is_legal(k3, "tp=48,ep=16")  # 2 of 96 heads a rank
    assert refused(k3, "tp=64,ep=64") == (
        "96 attention heads do not split over attn_tp = 64 (tp = 64, dp = 1); "
        "dp that works with this tp: 2, 4, 8, 16, 32, 64"
    )
    assert all(is_legal(k3, f"tp=64,dp={dp},ep=64") for dp in (2, 4, 8, 16, 32, 64))


def test_kda_heads_are_looked_at_too(k3: TextConfig) -> None:
    message = refused(replace(k3, kda_num_heads=24), "tp=64,dp=2,ep=64")
    assert message.startswith(
        "24 KDA heads do not split over attn_tp = 32 (tp = 64, dp = 2); dp that works with this tp: "
    )
    assert message.endswith("tp: 8, 16, 32, 64")


def test_whole_experts(k3: TextConfig) -> None:
    assert refused(k3, "tp=48,ep=48") == (
        "896 experts over ep = 48 is 18.67 a rank, experts must be whole; ep that works with tp = 48: 1, 2, 4, 8, 16"
    )
    assert all(is_legal(k3, f"tp=48,ep={ep}") == (ep in (1, 2, 4, 8, 16)) for ep in (1, 2, 3, 4, 6, 8, 12, 16, 24, 48))


def test_whole_experts_with_an_all_to_all(k3: TextConfig) -> None:
    message = refused(k3, "tp=48,dispatch=alltoall")
    assert (
        "experts must be whole; tp that works with dispatch=alltoall: 1, 2, 4, 7, 8, 14, 16, 28, 32, 56, 64" in message
    )


def test_experts_that_share_scales_split_between_them(k3: TextConfig) -> None:
    assert is_legal(k3, "tp=48")  # 3072 / 48 = 64 columns of an expert a rank
    assert refused(k3, "tp=64,dp=2") == (
        "experts of width 3072 over tp / ep = 64 ranks is 48 a rank, must be a multiple of 32, the inputs that share a "
        "scale; split whole experts instead: ep that works with tp = 64: 2, 4, 8, 16, 32, 64"
    )
    assert is_legal(k3, "tp=64,dp=2", group=1)  # plain weights have no scales


def test_plain_experts_split_to_whole_columns(k3: TextConfig) -> None:
    message = refused(k3, "tp=5,dp=5", group=1)
    assert message.startswith("experts of width 3072 over tp / ep = 5 ranks is 614.4 a rank, must be whole; ")
    assert message.endswith("ep that works with tp = 5: none")


def test_width_of_the_shared_experts(k3: TextConfig) -> None:
    assert refused(k3, "tp=7,dp=7,ep=7") == (
        "the shared experts' width of 6144 does not split over tp = 7; sizes that do: 1, 2, 3, 4, 6, 8, 12"
    )
    narrow = replace(k3, moe_intermediate_size=48, num_shared_experts=1)
    assert refused(narrow, "tp=64,dp=2,dispatch=alltoall,shared=attn_tp", group=1) == (
        "the shared experts' width of 48 does not split over shared_experts_tp_size = 32; "
        "sizes that do: 1, 2, 3, 4, 6, 8, 12, 16, 24, 48"
    )


def test_width_of_the_dense_mlp(k3: TextConfig) -> None:
    assert refused(k3, "tp=7,dp=7,dispatch=alltoall") == (
        "the dense MLP's width of 33792 does not split over tp = 7; sizes that do: 1, 2, 3, 4, 6, 8, 11, 12; "
        "or use enable_dense_mlp_attn_tp (attn_tp = 1)"
    )
    assert is_legal(k3, "tp=7,dp=7,dispatch=alltoall,dense=attn_tp")
    assert refused(replace(k3, intermediate_size=33793), "tp=64,dp=4,dispatch=alltoall,dense=attn_tp") == (
        "the dense MLP's width of 33793 does not split over attn_tp = 16; sizes that do: 1"
    )


def test_the_vocabulary_always_splits(k3: TextConfig) -> None:
    assert is_legal(replace(k3, vocab_size=163_841), "tp=48,ep=16")
    assert is_legal(replace(k3, vocab_size=5), "tp=48,ep=16")


def test_stages_keep_residual_blocks_whole(k3: TextConfig) -> None:
    layout = ParallelLayout.parse("pp=2")
    assert [len(layout.stage_layers(stage, k3)) for stage in (0, 1)] == [48, 45]
    assert refused(k3, "pp=9") == (
        "pp = 9, but the 93 layers are only 8 residual blocks of 12, which stay whole; pp that works: 1..8"
    )


@pytest.mark.parametrize("pp", range(1, 9))
@pytest.mark.parametrize("block", [12, None, 1, 50])
def test_stages_share_out_all_layers(k3: TextConfig, pp: int, block: int | None) -> None:
    config = replace(k3, attn_res_block_size=block)
    if block == 50 and pp > 2:
        assert not is_legal(config, f"pp={pp}")
        return
    stages = [ParallelLayout.parse(f"pp={pp}").stage_layers(stage, config) for stage in range(pp)]
    assert [layer for stage in stages for layer in stage] == list(range(93))
    assert all(stage.start % (block or 1) == 0 and len(stage) for stage in stages)


# What the options allow.


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("tp=0", "tp = 0, must be at least 1"),
        ("tp=4,pp=0", "pp = 0, must be at least 1"),
        ("tp=6,dp=4", "dp = 4 does not divide tp = 6; dp that does: 1, 2, 3, 6"),
        ("tp=6,ep=4", "ep = 4 does not divide tp = 6; ep that does: 1, 2, 3, 6"),
        ("dispatch=deepep", "dispatch is 'deepep'; choices: gather, alltoall, mc2"),
        ("tp=8,ep=4,dispatch=mc2", "dispatch=mc2 needs whole experts on every rank: ep = tp = 8, found ep = 4"),
        (
            "tp=64,dp=4,dispatch=alltoall,shared=3",
            "shared_experts_tp_size = 3 does not divide attn_tp = 16; sizes that do: 1, 2, 4, 8, 16",
        ),
        (
            "tp=64,dp=4,dispatch=alltoall,shared=32",
            "shared_experts_tp_size = 32 does not divide attn_tp = 16; sizes that do: 1, 2, 4, 8, 16",
        ),
        (
            "tp=4,dispatch=alltoall,shared=0",
            "shared_experts_tp_size = 0 does not divide attn_tp = 4; sizes that do: 1, 2, 4",
        ),
    ],
)
def test_refused_without_a_model(layout: str, message: str) -> None:
    with pytest.raises(LayoutError, match=f"^{re.escape(message)}$"):
        ParallelLayout.parse(layout)


@pytest.mark.parametrize("option", ["shared=attn_tp", "shared=2"])
def test_options_for_the_shared_experts_need_an_all_to_all(option: str) -> None:
    with pytest.raises(
        IgnoredOptionError, match=r"need an all-to-all dispatch; .* Use dispatch=alltoall \(with ep = tp\), or"
    ):
        ParallelLayout.parse(f"tp=4,ep=4,{option}")


@pytest.mark.parametrize(
    ("layout", "note"),
    [
        ("tp=4,dense=attn_tp", "enable_dense_mlp_attn_tp changes nothing with dp = 1: attn_tp is tp"),
        ("tp=4,lm_head=dp", "enable_dp_lm_head changes nothing with dp = 1: attn_tp is tp"),
        (
            "tp=4,dp=4,dispatch=alltoall,shared=attn_tp",
            "enable_shared_experts_attn_tp changes nothing with attn_tp = 1 (dp = tp)",
        ),
    ],
)
def test_options_without_effect_are_warned_of(layout: str, note: str) -> None:
    with pytest.warns(UserWarning, match=f"^{re.escape(note)}$"):
        assert ParallelLayout.parse(layout).notes() == (note,)


def test_a_size_takes_precedence() -> None:
    with pytest.warns(
        UserWarning, match="shared_experts_tp_size = 4 takes precedence over enable_shared_experts_attn_tp"
    ):
        layout = ParallelLayout(
            tp=32, ep=32, moe_dispatch="alltoall", enable_shared_experts_attn_tp=True, shared_experts_tp_size=4
        )
    assert layout.shared_ways == 4


def test_a_layout_whose_options_all_count_warns_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    assert ParallelLayout.parse("tp=64,dp=4,dispatch=alltoall,shared=attn_tp,dense=attn_tp,lm_head=dp").notes() == ()
    assert not recwarn.list


# Former environment variables.


@pytest.mark.parametrize(("variable", "option"), FORMER_VARIABLES.items())
@pytest.mark.parametrize("value", ["1", "true", "ON", "yes"])
def test_former_variables_act_and_name_their_option(variable: str, option: str, value: str) -> None:
    layout = ParallelLayout.parse("tp=8,dp=2,dispatch=alltoall")
    key = "shared" if variable == SHARED else "dense"
    flag = f"--{option.replace('_', '-')}"
    with pytest.warns(UserWarning, match=f"^{variable} is a former name: use {flag}, or {key}=attn_tp in a layout$"):
        changed = layout.with_former_variables({variable: value})
    assert changed == ParallelLayout.parse(f"tp=8,dp=2,dispatch=alltoall,{key}=attn_tp")


def test_variables_that_are_unset_or_empty_do_nothing(recwarn: pytest.WarningsRecorder) -> None:
    layout = ParallelLayout.parse("tp=8,dp=2,dispatch=alltoall")
    assert layout.with_former_variables({SHARED: "", "OTHER": "1"}) == layout
    assert not recwarn.list


@pytest.mark.filterwarnings("ignore")
def test_a_variable_may_agree_with_its_option() -> None:
    layout = ParallelLayout.parse("tp=8,dp=2,dispatch=alltoall,dense=attn_tp")
    assert layout.with_former_variables({DENSE: "1"}, given=frozenset({"enable_dense_mlp_attn_tp"})) == layout


@pytest.mark.parametrize(("text", "value"), [("dense=attn_tp", "0"), ("dense=tp", "1")])
def test_a_variable_may_not_contradict_its_option(text: str, value: str) -> None:
    layout = ParallelLayout.parse(f"tp=8,dp=2,dispatch=alltoall,{text}")
    set_to = layout.enable_dense_mlp_attn_tp
    message = f"^{DENSE}={value} contradicts enable_dense_mlp_attn_tp = {set_to}; unset the variable$"
    with pytest.raises(LayoutError, match=message):
        layout.with_former_variables({DENSE: value}, given=frozenset({"enable_dense_mlp_attn_tp"}))


def test_a_variable_must_be_true_or_false() -> None:
    message = f"^{SHARED}='2' is neither true nor false; set enable_shared_experts_attn_tp instead$"
    with pytest.raises(LayoutError, match=message):
        ParallelLayout.parse("tp=8,dispatch=alltoall").with_former_variables({SHARED: "2"})


def test_a_variable_is_refused_like_its_option() -> None:
    with pytest.warns(UserWarning, match=SHARED), pytest.raises(LayoutError, match="need an all-to-all dispatch"):
        ParallelLayout.parse("tp=8").with_former_variables({SHARED: "1"})


# As text.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp", "layout: 'tp' is not key=value"),
        ("tp=", "layout: 'tp=' is not key=value"),
        ("tp=four", "layout: tp=four is not a number"),
        ("tp=-4", "layout: tp=-4 is not a number"),
        ("tp=4,tp=8", "layout: tp is given twice"),
        ("cp=2", "layout: unknown key 'cp'; keys: tp, dp, ep, pp, dispatch, shared, dense, lm_head"),
        ("tp=4,dense=dp", "layout: dense=dp; choices: tp, attn_tp"),
        ("tp=4,lm_head=attn_tp", "layout: lm_head=attn_tp; choices: tp, dp"),
        ("tp=4,dispatch=alltoall,shared=all", "layout: shared=all is not a number"),
    ],
)
def test_text_that_is_no_layout(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=f"^{re.escape(message)}"):
        ParallelLayout.parse(text)


def test_text_in_any_order_and_spacing() -> None:
    text = "tp=64,dp=4,ep=64,dispatch=alltoall,shared=attn_tp,dense=attn_tp"
    assert str(ParallelLayout.parse(text)) == text
    assert ParallelLayout.parse(" dense = attn_tp, shared=attn_tp , dispatch=alltoall,dp=4,tp=64,") == (
        ParallelLayout.parse(text)
    )
    assert str(ParallelLayout.parse("")) == "tp=1"


@st.composite
def layouts(draw: st.DrawFn) -> ParallelLayout:
    """Any layout that needs no model to be refused, without options that another one overrides."""
    tp = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16, 48, 64]))
    divisors = st.sampled_from([d for d in range(1, tp + 1) if tp % d == 0])
    dp, dispatch = draw(divisors), draw(st.sampled_from(["gather", "alltoall", "mc2"]))
    shared = draw(st.sampled_from([None, True, *(d for d in range(1, tp // dp + 1) if tp // dp % d == 0)]))
    if dispatch == "gather":
        shared = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ParallelLayout(
            tp=tp,
            dp=dp,
            ep=draw(divisors) if dispatch == "gather" else tp,
            pp=draw(st.integers(1, 8)),
            moe_dispatch=dispatch,
            enable_shared_experts_attn_tp=shared is True,
            shared_experts_tp_size=None if shared is True else shared,
            enable_dense_mlp_attn_tp=draw(st.booleans()),
            enable_dp_lm_head=draw(st.booleans()),
        )


@pytest.mark.filterwarnings("ignore")
@given(layouts())
def test_text_and_layout_are_the_same_thing(layout: ParallelLayout) -> None:
    again = ParallelLayout.parse(str(layout))
    assert again == layout
    assert hash(again) == hash(layout)
    assert str(again) == str(layout)
    assert ParallelLayout(**asdict(layout)) == layout


# Which ranks form which groups.

AXES: tuple[AxisName, ...] = ("tp", "attn_tp", "dp", "ep", "moe_tp", "shared", "dense", "vocab")


@given(layouts())
def test_every_rank_is_once_in_one_group_of_every_axis(layout: ParallelLayout) -> None:
    for name in AXES:
        groups = {layout.axis(name, rank).members for rank in range(layout.tp)}
        assert sorted(member for group in groups for member in group) == list(range(layout.tp))
        for rank in range(layout.tp):
            axis = layout.axis(name, rank)
            assert axis.members[axis.rank] == rank
            assert list(axis.members) == sorted(axis.members)


@given(layouts())
def test_what_axes_have_to_do_with_each_other(layout: ParallelLayout) -> None:
    for rank in range(layout.tp):
        members = {name: set(layout.axis(name, rank).members) for name in AXES}
        assert len(members["attn_tp"] & members["dp"]) == len(members["ep"] & members["moe_tp"]) == 1
        assert len(members["attn_tp"]) * len(members["dp"]) == len(members["ep"]) * len(members["moe_tp"]) == layout.tp
        if layout.uses_all_to_all:
            assert members["shared"] <= members["attn_tp"]
        assert members["dense"] == members["attn_tp" if layout.enable_dense_mlp_attn_tp else "tp"]
        assert members["vocab"] == members["attn_tp" if layout.enable_dp_lm_head else "tp"]


def test_ranks_are_numbered_as_sglang_numbers_them() -> None:
    layout = ParallelLayout.parse("tp=8,dp=2,ep=4")
    assert [layout.axis("attn_tp", rank).members for rank in (0, 4)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert layout.axis("dp", 5).members == (1, 5)
    assert layout.axis("ep", 5).members == (1, 3, 5, 7)
    assert layout.axis("moe_tp", 5).members == (4, 5)
    with pytest.raises(LayoutError, match=r"rank 8 is outside 0\.\.7"):
        layout.axis("tp", 8)
