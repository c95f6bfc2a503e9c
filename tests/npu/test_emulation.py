"""The emulated operators themselves: right numbers by another formula, and shapes as torch_npu's."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.npu.emulation import LIFTABLE, calls, fresh, install, lifted
from tests.npu.emulation.cases import CASES, NPU, gmm_w4a8, int4, int8, on, pack, randn, run, with_arguments
from tests.npu.emulation.core import FLOAT4_E2M1
from tests.npu.emulation.weights import decode_e2m1, decode_e8m0, unpack_int4


@pytest.fixture(autouse=True)
def a3():
    install()
    fresh()
    torch.manual_seed(0)
    with on("a3"):
        yield


@pytest.mark.parametrize("case", [case for case in CASES if case != "int4pack"])  # it has no Meta function
def test_shapes_and_dtypes_are_those_of_torch_npu(case: str):
    def to_meta(value: object) -> object:
        if isinstance(value, list):
            return [to_meta(item) for item in value]
        return value.to("meta") if isinstance(value, Tensor) else value

    def describe(value: object) -> object:
        if isinstance(value, list | tuple):
            return [describe(item) for item in value]
        return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value

    arguments, got = with_arguments(case)
    assert calls[CASES[case][0]] >= 1
    meta = getattr(NPU, CASES[case][0])(**{name: to_meta(value) for name, value in arguments.items()})
    assert describe(got) == describe(meta)


def test_every_emulated_operator_has_a_case():
    assert {op for op, _ in CASES.values()} == set(LIFTABLE)


def close(got: Tensor, want: Tensor):
    torch.testing.assert_close(got.float(), want.float(), rtol=1e-2, atol=1e-2)


def test_batched_matmuls():
    arguments, got = with_arguments("transpose_batchmatmul")
    close(got, torch.einsum("mbk,bkn->mbn", arguments["input"].float(), arguments["weight"].float()))
    head_major = arguments["input"].transpose(0, 1).contiguous()
    close(run("transpose_batchmatmul", input=head_major, weight=arguments["weight"], perm_x1=None, perm_y=None), got)
    arguments, nothing = with_arguments("sgl_bmm")
    assert nothing is None
    want = torch.einsum("mbk,bkn->mbn", arguments["tensor_a"].float(), arguments["tensor_b"].float())
    close(arguments["tensor_c"], want)


def test_norms():
    arguments, (y, rstd) = with_arguments("rms_norm")
    x, gamma = arguments["input"].float(), arguments["gamma"].float()
    close(y, F.rms_norm(x, (64,), gamma, 1e-5))
    close(rstd, 1 / (x.square().sum(1, keepdim=True) / 64 + 1e-5).sqrt())
    arguments, (y, _, total) = with_arguments("add_rms_norm")
    assert torch.equal(total, arguments["x1"] + arguments["x2"])
    close(y, F.rms_norm(total.float(), (64,), arguments["gamma"].float(), 1e-5))


@pytest.mark.parametrize("options", [{}, {"group_count": 4, "k_group": 2}, {"norm_type": 0}], ids=str)
def test_gating(options: dict):
    arguments, (weights, ids, scores) = with_arguments("gating", **options)
    for t, row in enumerate(arguments["x"].tolist()):
        if arguments["norm_type"]:
            score = [1 / (1 + math.exp(-v)) for v in row]
        else:
            score = [math.exp(v) / sum(map(math.exp, row)) for v in row]
        choice = [s + b for s, b in zip(score, arguments["bias"].tolist(), strict=True)]
        groups = sorted(range(0, 12, 3), key=lambda g: -max(choice[g : g + 3]))[: options.get("k_group", 4)]
        allowed = [e for g in groups for e in range(g, g + 3)]
        best = sorted(sorted(allowed), key=lambda e: -choice[e])[:3]
        total = sum(score[e] for e in best) if arguments["norm_type"] else 1
        assert ids[t].tolist() == best
        torch.testing.assert_close(weights[t], torch.tensor([2.5 * score[e] / total for e in best]))
        torch.testing.assert_close(scores[t], torch.tensor(score))


def test_gating_prefers_the_lower_id_and_leaves_scores_undefined_unless_asked():
    _, ids, scores = run("gating", x=torch.zeros(1, 12), bias=torch.zeros(12), out_flag=False)
    assert ids.tolist() == [[0, 1, 2]]
    assert scores.isnan().all()


def test_rows_are_sorted_by_expert_and_found_again():
    arguments, (rows, index, sizes, scales) = with_arguments("init_routing")
    x = arguments["x"]
    assert sizes.tolist() == [2, 2]
    assert index.tolist() == [2, -1, 0, -1, 3, 1]  # [[2, 0], [1, 3], [2, 1]] with experts 1 and 2 here
    assert torch.equal(rows[:4], x[[1, 2, 0, 2]])
    assert rows[4:].isnan().all()
    assert scales.isnan().all()
    _, scatter, _, _ = run("init_routing", row_idx_type=1)
    assert scatter[:4].tolist() == [2, 5, 0, 4]
    assert (scatter[4:] > 5).all()


def test_rows_can_be_quantised_on_the_way():
    arguments, (rows, _, _, scales) = with_arguments("init_routing", quant_mode=1)
    picked = arguments["x"][[1, 2, 0, 2]].float()
    torch.testing.assert_close(rows[:4] * scales[:4, None], picked, rtol=0, atol=float(scales[:4].max()) / 2)
    assert (rows[4:] == 127).all()


@pytest.mark.parametrize("mode", [0, 2])
def test_finalize_sums_the_choices_of_a_token(mode: int):
    extras = {
        "skip1": randn(3, 8),
        "bias": randn(4, 8),
        "export_for_source_row": torch.tensor([[0, 1], [2, 3], [0, 2]]),
    }
    extras["export_for_source_row"] = extras["export_for_source_row"].int()
    arguments, got = with_arguments("finalize_routing", drop_pad_mode=mode, **extras)
    rows, order, scales = (arguments[n] for n in ("expanded_permuted_rows", "expanded_src_to_dst_row", "scales"))
    for t in range(3):
        want = extras["skip1"][t].float()
        for j in range(2):
            row = rows[order[t * 2 + j if mode == 2 else j * 3 + t]].float()
            want = want + scales[t, j].float() * (row + extras["bias"][extras["export_for_source_row"][t, j]].float())
        close(got[t], want)


def test_unpermute_is_finalize_in_row_order():
    arguments, got = with_arguments("unpermute")
    same = {"expanded_permuted_rows": arguments["permuted_tokens"], "scales": arguments["probs"]}
    same["expanded_src_to_dst_row"] = arguments["sorted_indices"].int()
    assert torch.equal(got, run("finalize_routing", drop_pad_mode=2, **same))
    order, alone = arguments["sorted_indices"], run("unpermute", **arguments | {"probs": None})
    assert torch.equal(alone, arguments["permuted_tokens"][order])


def by_row(arguments: dict, weight: Tensor) -> Tensor:
    """x[i] @ weight[the expert of row i] for the five rows that have an expert."""
    expert = torch.tensor([0, 0, 0, 2, 2])
    return torch.einsum("mk,mkn->mn", arguments["x"][0][:5].float(), weight[expert])


def test_grouped_matmul_plain():
    arguments, [y] = with_arguments("gmm_plain")
    close(y[:5], by_row(arguments, arguments["weight"][0].float()) + arguments["bias"][0][[0, 0, 0, 2, 2]])
    assert y[5].isnan().all()
    transposed = arguments["weight"][0].mT.contiguous().mT
    again = arguments | {"weight": [transposed], "group_list": torch.tensor([3, 3, 5]), "group_list_type": 0}
    assert torch.equal(run("gmm_plain", **again)[0][:5], y[:5])


def test_grouped_matmul_w8a8():
    arguments, [y] = with_arguments("gmm_w8a8")
    scale = arguments["scale"][0][[0, 0, 0, 2, 2]].float() * arguments["per_token_scale"][0][:5, None]
    close(y[:5], by_row(arguments, arguments["weight"][0].float()) * scale)


def test_grouped_matmul_w4a8_needs_the_bias_that_undoes_its_shift():
    arguments, [y] = with_arguments("gmm_w4a8")
    scale = arguments["scale"][0].to(torch.int32).view(torch.float32)
    weight = unpack_int4(arguments["weight"][0]) * scale
    per_token = arguments["per_token_scale"][0][:5, None]
    close(y[:5], by_row(arguments, weight) * per_token)
    [shifted] = run("gmm_w4a8", **arguments | {"bias": [torch.zeros(3, 32)]})
    close(shifted[:5], by_row({"x": [arguments["x"][0].float() - 8]}, weight) * per_token)
    cumulative = arguments | {"group_list": torch.tensor([1, 1, 2]), "group_list_type": 0}
    assert not run("gmm_w4a8", **cumulative)[0][:4].isnan().any()  # read as counts all the same


def test_a_published_w4a8_weight_is_prepared_as_int4pack_would():
    w = int4(64, 32)  # [K, N]
    low, high = (w.T[0::2] & 0xF), (w.T[1::2] & 0xF)
    published = (low | high << 4).to(torch.uint8).view(torch.int8)  # [N/2, K]: rows 2i and 2i+1 in one byte
    assert torch.equal(published.T.contiguous().view(torch.int32), pack(w))
    assert torch.equal(unpack_int4(pack(w)), w.to(torch.int8))


def test_nz_must_be_cast_before_int8_is_seen_as_int32():
    arguments = gmm_w4a8()
    packed = arguments["weight"][0]
    right = NPU.npu_format_cast(packed.view(torch.int8), 29).view(torch.int32)
    assert torch.equal(run("gmm_w4a8", **arguments | {"weight": [right]})[0][:5], run("gmm_w4a8", **arguments)[0][:5])
    with pytest.raises(RuntimeError, match="cast it as int8, then view it"):
        run("gmm_w4a8", **arguments | {"weight": [NPU.npu_format_cast(packed, 29)]})


def test_grouped_matmul_w4a16():
    arguments, [y] = with_arguments("gmm_w4a16")
    w = (
        unpack_int4(arguments["weight"][0]).float().view(3, 2, 32, 32)
        * arguments["antiquant_scale"][0].float()[:, :, None]
    )
    close(y[:5], by_row(arguments, w.view(3, 64, 32)))


def test_grouped_matmul_mxfp4():
    arguments, [y] = with_arguments("gmm_mxfp4")

    def dequantise(values: Tensor, scale: Tensor) -> Tensor:
        return (values.unflatten(-1, (-1, 32)) * decode_e8m0(scale.flatten(-2)).unsqueeze(-1)).flatten(-2)

    w = dequantise(decode_e2m1(arguments["weight"][0].mT), arguments["antiquant_scale"][0].transpose(1, 2))
    x = dequantise(arguments["x"][0].float(), arguments["per_token_scale"][0])
    close(y[:5], by_row({"x": [x]}, w.mT))


def test_dynamic_quant_rounds_to_127_levels_and_keeps_zeros():
    arguments, (q, scale) = with_arguments("dynamic_quant")
    x = arguments["input"].float()
    torch.testing.assert_close(scale * 127, x.abs().max(1).values)
    assert (q[:3].abs().amax(1) == 127).all()
    assert ((q * scale[:, None] - x).abs() <= scale[:, None] / 2 * 1.001).all()
    assert not q[3].any()
    smooth = randn(16)
    assert torch.equal(
        run("dynamic_quant", **arguments | {"smooth_scales": smooth})[1], (x * smooth.float()).abs().amax(1) / 127
    )


def test_dynamic_mx_quant_by_hand():
    x = torch.tensor([[1.0] * 32 + [0.0] * 31 + [-448.0]])
    y, scale = run("dynamic_mx_quant", input=x)
    assert scale.tolist() == [[[127 - 8, 127 + 0]]]
    assert y.float().tolist() == [[256.0] * 32 + [0.0] * 31 + [-448.0]]
    # Exponent 2 - 2: the codes of 0, .5, 1, 1.5, 2, 3, 4, 6, and ties to the even one.
    levels = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, -6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0]
    packed, scale = run("dynamic_mx_quant", input=torch.tensor([levels * 4]), dst_type=FLOAT4_E2M1)
    assert scale.tolist() == [[[127, 127]]]
    want = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, -6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -4.0]
    assert decode_e2m1(packed).tolist() == [want * 4]


def test_quant_matmul():
    arguments, y = with_arguments("quant_matmul")
    product = (arguments["x1"].long() @ arguments["x2"].long()).float()
    close(y, product * arguments["scale"] * arguments["pertoken_scale"][:, None] + arguments["bias"])
    static = {"pertoken_scale": None, "bias": torch.arange(32, dtype=torch.int32)}
    close(run("quant_matmul", **arguments | static), (product + static["bias"]) * arguments["scale"])


def test_weight_quant_batchmatmul():
    arguments, y = with_arguments("weight_quant")
    w = unpack_int4(arguments["weight"]).float().view(2, 32, 32) + arguments["antiquant_offset"].float()[:, None]
    close(y, arguments["x"].float() @ (w * arguments["antiquant_scale"].float()[:, None]).view(64, 32))
    channel = {
        "weight": int8(64, 32),
        "antiquant_scale": randn(32),
        "antiquant_offset": None,
        "antiquant_group_size": 0,
    }
    want = arguments["x"].float() @ (channel["weight"] * channel["antiquant_scale"].float())
    close(run("weight_quant", **arguments | channel), want)


def test_format_cast_keeps_values_and_int4pack_keeps_order():
    arguments, got = with_arguments("format_cast")
    assert torch.equal(got, arguments["input"])
    assert pack(torch.tensor([[1, 2, 3, 4, 5, 6, 7, -8]], dtype=torch.int32)).item() == 0x87654321 - 2**32


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [S, N, D] after k, v [L, N, .]: query i of S sees keys up to L - S + i."""
    seen = torch.tensor([[j <= len(k) - len(q) + i for j in range(len(k))] for i in range(len(q))])
    q, k, v = (t.float().transpose(0, 1) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale).transpose(0, 1)


def test_absorbed_attention_reads_the_pages_of_each_sequence():
    case, (out, lse) = with_arguments("fia_absorbed")
    q = torch.cat((case["query"], case["query_rope"]), -1)
    latent, rope = case["key"].flatten(0, 1), case["key_rope"].flatten(0, 1)
    for rows, length, blocks in ((slice(0, 3), 20, [4, 1]), (slice(3, 4), 5, [2])):
        tokens = [block * 16 + i for block in blocks for i in range(16)][:length]
        key = torch.cat((latent[tokens], rope[tokens]), -1).unsqueeze(1).expand(-1, 4, -1)
        close(out[rows], dense_attention(q[rows], key, latent[tokens].unsqueeze(1).expand(-1, 4, -1), 0.05))
    scores = torch.einsum("nd,ld->nl", q[3].float(), key[:, 0].float()) * 0.05
    close(lse[3, :, 0], scores.exp().sum(1).log())

    heads_first = {name: case[name].unsqueeze(1) for name in ("key", "value", "key_rope")}
    assert torch.equal(run("fia_absorbed", **case | heads_first)[0], out)


def test_a_decode_step_is_the_same_in_both_layouts_and_zero_over_an_empty_cache():
    torch.manual_seed(1)
    out, _ = run("fia_absorbed_bsnd")
    torch.manual_seed(1)
    assert torch.equal(out[:, 0], run("fia_absorbed")[0][3:])
    assert not run("fia_absorbed_bsnd", actual_seq_kvlen=[0])[0].any()


def test_expanded_attention_is_causal_from_the_right():
    case, (out, lse) = with_arguments("fia_expanded")
    q, k = (torch.cat((case[name], case[f"{name}_rope"]), -1) for name in ("query", "key"))
    close(out[:3], dense_attention(q[:3], k[:7], case["value"][:7], 0.1))
    close(out[3:7], dense_attention(q[3:7], k[7:], case["value"][7:], 0.1))
    assert out[7:].isnan().all()
    assert lse.numel() == 0
    joined = {"query": q, "key": k, "query_rope": None, "key_rope": None}
    assert torch.equal(run("fia_expanded", **case | joined)[0][:7], out[:7])
    full = run("fia_expanded", **case | {"sparse_mode": 0, "atten_mask": None})[0]
    close(full[2], out[2])
    assert not torch.allclose(full[0].float(), out[0].float(), atol=1e-2)


def test_a_lifted_limit_is_listed_and_comes_back():
    with lifted("npu_dynamic_quant", "dtype") as broken:
        run("dynamic_quant")
        assert not broken
        run("dynamic_quant", input=torch.randn(3, 16))
    assert broken == {"npu_dynamic_quant dtype: torch.float32, must be float16 or bfloat16"}
    with pytest.raises(RuntimeError):
        run("dynamic_quant", input=torch.randn(3, 16))


def test_lifting_sizes_leaves_layouts_and_ranges():
    small = {"query": torch.randn(4, 4, 32), "query_rope": torch.randn(4, 4, 8), "key_rope": torch.randn(5, 16, 8)}
    small |= dict.fromkeys(("key", "value"), torch.randn(5, 16, 32))
    with lifted("npu_fused_infer_attention_score_v2", "head_dim", "dtype") as broken:
        assert run("fia_absorbed", **small)[0].shape == (4, 4, 32)
        with pytest.raises(RuntimeError, match="key must be contiguous"):
            run("fia_absorbed", **small | {"key": torch.randn(5, 16, 40)[..., :32]})
        with pytest.raises(RuntimeError, match="1 to 16 each"):
            run("fia_absorbed", **small | {"actual_seq_qlen": [4, 4]})
    assert sorted(line.split(":")[0].split()[1] for line in broken) == ["dtype", "head_dim"]


@pytest.mark.parametrize("limit", ["heads", "layout", ""])
def test_only_size_and_dtype_limits_can_be_lifted(limit: str):
    with pytest.raises(ValueError, match="no liftable limit"), lifted("npu_fused_infer_attention_score_v2", limit):
        pass
