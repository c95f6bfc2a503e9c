"""Loaded experts are laid out for the NPU's products, which then run on them; elsewhere they stay as published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from kimi_k3_npu import load_model
from kimi_k3_npu.checkpoint.load import load_weights
from kimi_k3_npu.checkpoint.reader import Checkpoint
from kimi_k3_npu.checkpoint.storage import read_storage
from kimi_k3_npu.formats import FORMATS
from kimi_k3_npu.model.experts import Experts
from kimi_k3_npu.ops import experts, nz
from kimi_k3_npu.ops.cases import INT8_ROWS_TWICE, MXFP8_ROWS, Tolerance
from kimi_k3_npu.ops.device import Device, assume, parse_cann
from kimi_k3_npu.ops.experts_int4 import w4a8_bias
from kimi_k3_npu.ops.op import CHOSEN
from kimi_k3_npu.parallel.mesh import Mesh
from tests.npu.emulation import experts as experts_emulation
from tests.npu.emulation import fresh, install
from tests.npu.emulation import weights as weights_emulation
from tests.npu.emulation.weights import nz_tiles, unpack_int4
from tests.npu.on_cpu import on_cpu
from tests.npu.test_model import FULL

if TYPE_CHECKING:
    from tests.conftest import Oracle

CANN = parse_cann("9.1")
A2, A3, A5 = (Device(soc, CANN) for soc in ("a2", "a3", "a5"))

#: Narrow experts whose matrices are whole tiles.
NARROW = replace(FULL, routed_expert_hidden_size=128, moe_intermediate_size=128)
T, BF16 = 9, torch.bfloat16


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    fresh()
    CHOSEN.clear()
    for module in (experts, nz):
        monkeypatch.setattr(module, "is_nz", lambda weight: nz_tiles(weight) is not None)


def filled(kind: str) -> Experts:
    """Any bytes are codes; scales and what completes W4A8 have to be right."""
    layer = Experts(NARROW, Mesh(), BF16, FORMATS[kind])
    for name, parameter in layer.named_parameters():
        if name.endswith("_scale"):
            parameter.data.copy_(torch.randint(118, 120, parameter.shape) if kind == "mxfp4" else 2**-5)
        elif not name.endswith("_bias"):
            parameter.data.view(torch.uint8).random_(0, 256)
    if kind == "w4a8":
        for matrix in ("w13", "w2"):
            codes, scale = (layer.get_parameter(matrix + part) for part in ("", "_scale"))
            layer.get_parameter(f"{matrix}_bias").data.copy_(w4a8_bias(codes, scale))
    return layer


def visit(layer: Experts) -> Tensor:
    torch.manual_seed(1)
    ids = torch.stack([torch.randperm(NARROW.num_experts)[:4] for _ in range(T)])
    return layer(torch.randn(T, NARROW.expert_hidden_size).to(BF16), torch.rand(T, 4), ids)


@pytest.mark.parametrize(
    ("kind", "device", "kernel", "tolerance"),
    [
        ("w4a8", A2, ("moe_experts_w4a8", "grouped_matmul_w4a8"), INT8_ROWS_TWICE),
        ("w4a8", A3, ("moe_experts_w4a8", "grouped_matmul_w4a8"), INT8_ROWS_TWICE),
        ("mxfp4", A5, ("moe_experts_mxfp4", "grouped_matmul_mxfp4"), MXFP8_ROWS),
    ],
    ids=["W4A8 on a2", "W4A8 on a3", "MXFP4 on a5"],
)
def test_the_product_runs_on_what_is_laid_out(
    kind: str, device: Device, kernel: tuple[str, str], tolerance: Tolerance
) -> None:
    layer = filled(kind)
    wanted = visit(layer).float()
    with on_cpu(), assume(device):
        visit(layer)
        assert CHOSEN[kernel] == 0  # not yet
        layer.prepare()
        first = dict(layer.named_parameters())
        layer.prepare()
        assert all(parameter is first[name] for name, parameter in layer.named_parameters())
        found = visit(layer).float()
    assert CHOSEN[kernel] == 1
    assert (found - wanted).abs().max() <= tolerance.error * wanted.abs().max()
    # Where no such product is, as after moving to a CPU, the same values are read from the new layout.
    torch.testing.assert_close(visit(layer).float(), wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "device"),
    [("w4a8", A5), ("mxfp4", A3), ("int4x2", A5)],
    ids=["W4A8 on a5", "MXFP4 on a3", "int4x2 on a5"],
)
def test_what_no_product_takes_stays_as_it_is(kind: str, device: Device) -> None:
    layer = filled(kind)
    before = dict(layer.named_parameters())
    with on_cpu(), assume(device):
        layer.prepare()
    assert all(parameter is before[name] for name, parameter in layer.named_parameters())


@pytest.fixture
def another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that packs and reads the nibbles of weight-only products in another order than files have."""
    for module in (weights_emulation, experts_emulation):
        monkeypatch.setattr(module, "nibble_order", [0, 2, 4, 6, 1, 3, 5, 7])


@pytest.mark.parametrize("device", [A2, A3], ids=["a2", "a3"])
def test_int4x2_is_laid_out_in_the_order_of_the_device(device: Device, another_order: None) -> None:
    layer, other = filled("int4x2"), filled("int4x2")
    wanted, wanted_other = visit(layer).float(), visit(other).float()
    with on_cpu(), assume(device):
        layer.prepare()
        first = dict(layer.named_parameters())
        layer.prepare()
        assert all(parameter is first[name] for name, parameter in layer.named_parameters())
        CHOSEN.clear()
        close(visit(layer).float(), wanted)
        assert CHOSEN["moe_experts_int4_group", "grouped_matmul_int4"] == 1

        places = {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}
        layer.restore()
        for name, parameter in layer.named_parameters():
            parameter.data.copy_(other.get_parameter(name))
        layer.prepare()
        assert {name: parameter.data_ptr() for name, parameter in layer.named_parameters()} == places
        close(visit(layer).float(), wanted_other)


def close(found: Tensor, wanted: Tensor) -> None:
    """To the rounding of two sums to bfloat16."""
    assert (found - wanted).abs().max() <= 2**-5 * wanted.abs().max()


def test_one_order_in_files_whatever_the_device_packs(oracle: Callable[[str], Oracle], another_order: None) -> None:
    """Loading MXFP4 as int4x2 for a device makes what a conversion on another machine has written."""
    source, options = oracle("k3-mxfp4"), {"expert_weights": "int4x2", "dtype": BF16}
    elsewhere = load_model(source.folder, **options).layers["2"].mlp.experts
    with on_cpu(), assume(A3):
        here = load_model(source.folder, **options).layers["2"].mlp.experts
    for name in ("w13_first", "w13_second", "w2_first", "w2_second"):
        codes, laid_out = elsewhere.get_parameter(name), here.get_parameter(name)
        assert torch.equal(unpack_int4(laid_out, weights_emulation.nibble_order), unpack_int4(codes)), name
        assert not torch.equal(laid_out, codes) or name.endswith("second")


@pytest.mark.parametrize(
    ("kind", "device", "stays"),
    [("w4a8", A2, True), ("w4a8", A3, True), ("mxfp4", A3, True), ("mxfp4", A5, False)],
    ids=["W4A8 on a2", "W4A8 on a3", "MXFP4 on a3", "MXFP4 on a5"],
)
def test_what_is_laid_out_again_is_written_over_the_former(kind: str, device: Device, stays: bool) -> None:
    """Captured graphs read it there. On an A5 nothing can be copied into NZ, and the engine captures them again."""
    layer, other = filled(kind), filled(kind)
    wanted = visit(other).float()
    with on_cpu(), assume(device):
        layer.prepare()
        visit(layer)
        places, tiles = ({n: f(p) for n, p in layer.named_parameters()} for f in (Tensor.data_ptr, nz_tiles))
        layer.restore()
        layer.restore()  # as after a load that failed
        for name, parameter in layer.named_parameters():
            parameter.data.copy_(other.get_parameter(name))
        layer.prepare()
        assert ({name: parameter.data_ptr() for name, parameter in layer.named_parameters()} == places) is stays
        assert {name: nz_tiles(parameter) for name, parameter in layer.named_parameters()} == tiles
    torch.testing.assert_close(visit(layer).float(), wanted, rtol=0, atol=0)


def test_loading_lays_out_and_can_be_done_again(oracle: Callable[[str], Oracle]) -> None:
    source = oracle("k3-w4a8")
    published = source.model.layers["2"].mlp.experts
    with on_cpu(), assume(A3):
        model = load_model(source.folder)
        layer = model.layers["2"].mlp.experts
        assert (layer.w13.dtype, layer.w13_scale.dtype) == (torch.int32, torch.int64)
        assert published.w13.dtype == torch.int8
        first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
        checkpoint = Checkpoint.open(source.folder)
        load_weights(model, checkpoint, read_storage(checkpoint, model.config))
    again = model.state_dict()
    assert again.keys() == first.keys()
    for name, tensor in again.items():
        assert torch.equal(tensor, first[name]), name
        assert tensor.data_ptr() == places[name], name
    x, weights = torch.randn(T, model.config.text.expert_hidden_size), torch.rand(T, 4)
    ids = torch.stack([torch.randperm(16)[:4] for _ in range(T)])
    assert torch.equal(layer(x, weights, ids), published(x, weights, ids))
