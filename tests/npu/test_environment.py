"""What the other tests of this folder stand on: this really is torch_npu, and no NPU is needed for it."""

import pytest
import torch
import torch_npu


def test_torch_npu_is_the_pinned_release():
    assert torch_npu.__version__.split("+")[0] == "2.13.0"


def test_schema_is_torch_npus_own():
    assert str(torch.ops.npu.npu_transpose_batchmatmul.default._schema) == (
        "npu::npu_transpose_batchmatmul(Tensor input, Tensor weight, *, Tensor? bias=None, Tensor? scale=None, "
        "int[]? perm_x1=None, int[]? perm_x2=None, int[]? perm_y=None, int? batch_split_factor=1) -> Tensor"
    )


def test_meta_function_is_torch_npus_own():
    out = torch_npu.npu_transpose_batchmatmul(
        torch.empty(3, 12, 512, dtype=torch.bfloat16, device="meta"),
        torch.empty(12, 512, 128, dtype=torch.bfloat16, device="meta"),
        perm_x1=[1, 0, 2],
        perm_y=[1, 0, 2],
    )
    assert out.shape == (3, 12, 128)
    assert out.dtype == torch.bfloat16


def test_there_is_no_device_behind_a_stand_in(stand_in: bool):
    if not stand_in:
        pytest.skip("CANN is installed here")
    assert torch.npu.device_count() == 0
    assert not torch.npu.is_available()
    with pytest.raises(RuntimeError):
        torch.empty(1, device="npu")


def test_every_test_runs_in_inference_mode():
    assert torch.is_inference_mode_enabled()
