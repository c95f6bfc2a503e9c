"""Images become the published features, and text around them the published logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from kimi_k3_npu.model.attention import CachedAttention
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
from kimi_k3_npu.model.vision import Grid, VisionTower, image_features, splice
from kimi_k3_npu.parallel.groups import Group

if TYPE_CHECKING:
    from tests.conftest import Oracle

TOLERANCE = 5e-4


@pytest.fixture
def vision(oracle: Callable[[str], Oracle]) -> Oracle:
    return oracle("k3-vision")


def grids(oracle: Oracle) -> list[Grid]:
    return [(t, rows, columns) for t, rows, columns in oracle.tensors["grid_thws"].tolist()]


@torch.inference_mode()
def features(model: KimiK3ForCausalLM, pixels: Tensor, images: list[Grid]) -> tuple[list[Tensor], list[Tensor]]:
    """Per image what the tower gives and what the projector makes of it."""
    assert model.vision_tower is not None
    assert model.mm_projector is not None
    merged = model.vision_tower(pixels, images)
    return merged, [model.mm_projector(part) for part in merged]


def test_tower_and_projector(vision: Oracle) -> None:
    tower, projected = features(vision.model, vision.tensors["pixel_values"], grids(vision))
    assert len(tower) == 3
    for i in range(3):
        torch.testing.assert_close(tower[i], vision.tensors[f"image{i}.tower"], rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(projected[i], vision.tensors[f"image{i}.projected"], rtol=0, atol=TOLERANCE)


def test_images_do_not_see_each_other(vision: Oracle) -> None:
    pixels, images = vision.tensors["pixel_values"], grids(vision)
    _, together = features(vision.model, pixels, images)
    sizes = [t * rows * columns for t, rows, columns in images]
    for part, grid, expected in zip(pixels.split(sizes), images, together, strict=True):
        _, (alone,) = features(vision.model, part, [grid])
        torch.testing.assert_close(alone, expected, rtol=0, atol=1e-5)


def test_frames_of_a_clip_get_a_wave_each_and_a_still_image_none(vision: Oracle) -> None:
    tower = vision.model.vision_tower
    assert tower is not None
    _, rows, columns = grids(vision)[0]
    pixels = vision.tensors["pixel_values"][: rows * columns]
    still = tower.patch_embed(pixels, [(1, rows, columns)])
    clip = tower.patch_embed(pixels.repeat(3, 1, 1, 1), [(3, rows, columns)])
    half = still.shape[-1] // 2
    for frame, embedded in enumerate(clip.split(rows * columns)):
        angles = [frame / 10000 ** (i / half) for i in range(half)]
        wave = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)])
        torch.testing.assert_close(embedded - still, wave.expand_as(still), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["blocks.0.norm0", "blocks.0.norm1", "final_layernorm"])
def test_norms_are_torch_s_without_an_eps(vision: Oracle, name: str, dtype: torch.dtype) -> None:
    """Small rows tell: their mean square is 1e-6, near fp32's eps and far below bf16's, which would all but erase
    them."""
    config = vision.model.config.vision
    assert config is not None
    with torch.device("cpu"):
        norm = VisionTower(config, dtype).get_submodule(name)
    torch.nn.init.normal_(norm.weight)
    published = nn.RMSNorm(config.vt_hidden_size, dtype=dtype)
    published.weight.data.copy_(norm.weight)
    x = (torch.randn(5, config.vt_hidden_size) * 1e-3).to(dtype)
    want = published(x)
    torch.testing.assert_close(norm(x), want)
    assert want.float().std() > 0.5


def test_frames_are_averaged_and_2x2_neighbours_merged(vision: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its blocks the tower is embedding, norm and merge, which loops can follow."""
    tower = vision.model.vision_tower
    assert tower is not None
    monkeypatch.setitem(tower._modules, "blocks", nn.ModuleList())
    frames, rows, columns = 2, 4, 6
    pixels = torch.randn(frames * rows * columns, 3, 14, 14)
    (merged,) = tower(pixels, [(frames, rows, columns)])
    x = tower.final_layernorm(tower.patch_embed(pixels, [(frames, rows, columns)])).view(frames, rows, columns, -1)
    expected = [
        [sum(x[t, r + dr, c + dc] for t in range(frames)) / frames for dr in range(2) for dc in range(2)]
        for r in range(0, rows, 2)
        for c in range(0, columns, 2)
    ]
    torch.testing.assert_close(merged, torch.stack([torch.stack(block) for block in expected]), rtol=0, atol=1e-6)


def test_logits_of_text_with_images_in_it(vision: Oracle) -> None:
    """Each placeholder token is replaced by all features of its image, so 8 tokens and 52 features make 57 rows."""
    model, ids = vision.model, vision.tensors["input_ids"]
    _, projected = features(model, vision.tensors["pixel_values"], grids(vision))
    with torch.inference_mode():
        images = iter(projected)
        placeholder = model.config.media_placeholder_token_id
        rows = [next(images) if token == placeholder else model.embed(token.view(1), [1]) for token in ids]
        spliced = torch.cat(rows)
        cache = model.new_cache(1, len(spliced))
        attention = CachedAttention(cache, [cache.join()], [len(spliced)])
        logits = model.logits(model(ids, attention, inputs_embeds=spliced))
    assert next(images, None) is None
    torch.testing.assert_close(logits, vision.tensors["logits"], rtol=0, atol=TOLERANCE)


class Apart(Group):
    """One rank of several that run one after the other: what each would send is kept, and the last gets it all."""

    sent: list[Tensor]

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        assert len(x) == counts[self.rank]
        self.sent.append(x)
        return torch.cat([*self.sent, x.new_empty(sum(counts[len(self.sent) :]), x.shape[1])])


@pytest.mark.parametrize("ranks", [2, 3, 5])
@torch.inference_mode()
def test_ranks_share_the_images(vision: Oracle, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each image is run by one rank, and all ranks get all features in order, also when some have no image."""
    tower, projector = vision.model.vision_tower, vision.model.mm_projector
    assert tower is not None
    assert projector is not None
    pixels, images = vision.tensors["pixel_values"], grids(vision)
    expected = torch.cat([vision.tensors[f"image{i}.projected"] for i in range(3)])
    torch.testing.assert_close(image_features(tower, projector, pixels, images), expected, rtol=0, atol=TOLERANCE)
    ran: list[list[Grid]] = []
    forward = tower.forward
    monkeypatch.setattr(tower, "forward", lambda pixels, grids: ran.append(grids) or forward(pixels, grids))
    sent: list[Tensor] = []
    for rank in range(ranks):
        group = Apart("attn_tp", rank, ranks)
        object.__setattr__(group, "sent", sent)
        together = image_features(tower, projector, pixels, images, group)
    torch.testing.assert_close(together, expected, rtol=0, atol=TOLERANCE)
    assert sorted(grid for share in ran for grid in share) == sorted(images)
    assert max(len(share) for share in ran) == -(-3 // ranks)


@torch.inference_mode()
def test_no_image(vision: Oracle) -> None:
    tower, projector = vision.model.vision_tower, vision.model.mm_projector
    assert tower is not None
    assert projector is not None
    assert image_features(tower, projector, torch.empty(0, 3, 14, 14), []).shape == (0, 64)


@pytest.mark.parametrize(
    ("images", "wanted"),
    [
        ([(1, 4, 3)], "does not divide into blocks of 2x2"),
        ([(0, 4, 4)], "does not divide into blocks"),
        ([(1, 4, 4), (1, 2, 2)], "the grids make them"),
        ([], "the grids make them"),
    ],
)
def test_grids_that_are_wrong(vision: Oracle, images: list[Grid], wanted: str) -> None:
    tower, projector = vision.model.vision_tower, vision.model.mm_projector
    assert tower is not None
    assert projector is not None
    with pytest.raises(ValueError, match=wanted):
        image_features(tower, projector, torch.zeros(16, 3, 14, 14), images)


def test_splice() -> None:
    rows, ids = torch.arange(10.0).view(5, 2), torch.tensor([7, 3, 7, 4, 7])
    spliced = splice(rows, ids, 7, -torch.ones(3, 2))
    assert spliced.tolist() == [[-1, -1], [2, 3], [-1, -1], [6, 7], [-1, -1]]
    assert rows[0].tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"the prompt has 3 placeholder tokens \(7\) for 2 image features"):
        splice(rows, ids, 7, torch.ones(2, 2))
