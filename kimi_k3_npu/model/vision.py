"""The vision tower and the projector: images as patches in, rows for the text model's embedding out.

Letters: P patches of all images laid end to end, h heads of width d, D hidden width of the tower. An image (or clip)
is a grid (t, rows, columns) of patches; attention is full within one image and never crosses to another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kimi_k3_npu.config import VisionConfig
from kimi_k3_npu.model.norm import RMSNorm
from kimi_k3_npu.parallel.groups import Group
from kimi_k3_npu.parallel.linear import ReplicatedLinear
from kimi_k3_npu.parallel.shard import Layer, whole

Grid = tuple[int, int, int]

ROPE_THETA = 10000.0
#: The tower's published norms give no eps. torch then takes that of the dtype it computes in, fp32 for narrower ones
#: too.
TOWER_NORM_EPS = torch.finfo(torch.float32).eps


class PatchEmbedding(Layer):
    """Patches to vectors, plus where they are: a learned table resized to the grid, and a fixed wave over frames."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        width, p = config.vt_hidden_size, config.patch_size
        table = (config.init_pos_emb_height, config.init_pos_emb_width, width)
        self.proj = self.allocate("proj", (width, 3, p, p), whole(width, 3, p, p), dtype)
        self.pos_emb = self.allocate("pos_emb", table, whole(*table), dtype)

    def forward(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """pixels [P, 3, p, p] -> [P, D]."""
        patches = F.linear(pixels.flatten(1), self.proj.flatten(1))
        return patches + torch.cat([self._positions(grid) for grid in grids])

    def _positions(self, grid: Grid) -> Tensor:
        frames, rows, columns = grid
        table: Tensor = self.pos_emb
        if (rows, columns) != table.shape[:2]:
            channels_first = table.permute(2, 0, 1).unsqueeze(0)
            resized = F.interpolate(channels_first, (rows, columns), mode="bilinear", align_corners=False)
            table = resized[0].permute(1, 2, 0)
        spatial = table.reshape(1, rows * columns, -1)
        if frames > 1:
            spatial = spatial + _frame_waves(frames, spatial.shape[-1]).to(spatial).unsqueeze(1)
        return spatial.flatten(0, 1)


class VisionBlock(Layer):
    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        width, inner = config.vt_hidden_size, config.qkv_hidden_size
        self.num_heads = config.vt_num_attention_heads
        self.norm0, self.norm1 = (RMSNorm(width, TOWER_NORM_EPS, dtype) for _ in range(2))
        self.wqkv = ReplicatedLinear(width, 3 * inner, dtype)
        self.wo = ReplicatedLinear(inner, width, dtype)
        self.fc0 = ReplicatedLinear(width, config.vt_intermediate_size, dtype)
        self.fc1 = ReplicatedLinear(config.vt_intermediate_size, width, dtype)

    def forward(self, x: Tensor, rotation: Tensor, lengths: Sequence[int]) -> Tensor:
        """x [P, D], rotation [2, P, d / 2] -> [P, D]."""
        q, k, v = self.wqkv(self.norm0(x)).unflatten(-1, (3, self.num_heads, -1)).unbind(1)  # [P, h, d]
        q, k = _rotate(q, rotation), _rotate(k, rotation)
        per_image = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        attended = [
            F.scaled_dot_product_attention(*(part.transpose(0, 1).unsqueeze(0) for part in image))[0].transpose(0, 1)
            for image in per_image
        ]
        x = x + self.wo(torch.cat(attended).flatten(1))
        return x + self.fc1(F.gelu(self.fc0(self.norm1(x)), approximate="tanh"))


class VisionTower(Layer):
    """Patches of several images to merged features, [features, merge area, D]: frames averaged, neighbours side by
    side."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbedding(config, dtype)
        self.blocks = nn.ModuleList(VisionBlock(config, dtype) for _ in range(config.vt_num_hidden_layers))
        self.final_layernorm = RMSNorm(config.vt_hidden_size, TOWER_NORM_EPS, dtype)

    def forward(self, pixels: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
        """pixels [P, 3, p, p], one grid (t, rows, columns) an image -> per image [rows * columns / area, area, D]."""
        if not grids:
            return []
        lengths = [t * rows * columns for t, rows, columns in grids]
        head_dim = self.config.qkv_hidden_size // self.config.vt_num_attention_heads
        rotation = torch.cat([_rotations(grid, head_dim) for grid in grids], dim=1).to(pixels.device)
        x = self.patch_embed(pixels, grids)
        for block in self.blocks:
            x = block(x, rotation, lengths)
        x = self.final_layernorm(x)
        merge = self.config.merge_kernel_size
        return [_merge(part, grid, merge) for part, grid in zip(x.split(lengths), grids, strict=True)]

    def check(self, pixels: Tensor, grids: Sequence[Grid]) -> None:
        """Raise ValueError for grids that are not those of `pixels`, or that do not divide into merged blocks."""
        height, width = self.config.merge_kernel_size
        for grid in grids:
            if min(grid) < 1 or grid[1] % height or grid[2] % width:
                raise ValueError(f"grid {tuple(grid)} of patches does not divide into blocks of {height}x{width}")
        p, patches = self.config.patch_size, sum(t * rows * columns for t, rows, columns in grids)
        if tuple(pixels.shape) != (patches, 3, p, p):
            raise ValueError(f"pixels are {list(pixels.shape)}, the grids make them {[patches, 3, p, p]}")


class Projector(Layer):
    """Merged features to rows of the text embedding: two linear layers with exact GELU, then an RMS norm.

    A text model whose hidden state was `rotated` to quantise it better comes with the rotation, for images to follow.
    """

    def __init__(self, config: VisionConfig, dtype: torch.dtype, *, rotated: bool = False) -> None:
        super().__init__()
        merged = config.mm_hidden_size * config.merge_kernel_size[0] * config.merge_kernel_size[1]
        self.linear_1 = ReplicatedLinear(merged, merged, dtype)
        self.linear_2 = ReplicatedLinear(merged, config.text_hidden_size, dtype)
        self.post_norm = RMSNorm(config.text_hidden_size, config.projector_ln_eps, dtype)
        width = config.text_hidden_size
        self.rot_proj = ReplicatedLinear(width, width, dtype) if rotated else None

    @property
    def device(self) -> torch.device:
        return self.linear_1.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.linear_1.weight.dtype

    def forward(self, features: Tensor) -> Tensor:
        """[n, merge area, D] -> [n, text hidden size]."""
        rows = self.post_norm(self.linear_2(F.gelu(self.linear_1(features.flatten(1)))))
        return rows if self.rot_proj is None else self.rot_proj(rows)


def image_features(
    tower: VisionTower, projector: Projector, pixels: Tensor, grids: Sequence[Grid], group: Group | None = None
) -> Tensor:
    """pixels [P, 3, p, p] -> [features, H], the images' rows for the text model end to end.

    Every rank of `group` has all pixels and gets all features, but runs the tower for its share of the images only.
    Raises ValueError, on every rank alike, for pixels that are not those of the grids.
    """
    tower.check(pixels, grids)
    group = group or Group("vision")
    height, width = tower.config.merge_kernel_size
    features = [rows * columns // (height * width) for _, rows, columns in grids]
    patches = [t * rows * columns for t, rows, columns in grids]
    shares = _shares(patches, group.size)
    mine = shares[group.rank]
    parts = pixels.split(patches) if grids else []
    own = torch.cat([pixels[:0], *(parts[i] for i in mine)]).to(projector.device, projector.dtype)
    merged = tower(own, [grids[i] for i in mine])
    empty = own.new_empty(0, height * width, tower.config.vt_hidden_size)
    counts = [sum(features[i] for i in share) for share in shares]
    gathered = group.all_gather(projector(torch.cat([empty, *merged])), counts)
    order = [i for share in shares for i in share]
    by_image = dict(zip(order, gathered.split([features[i] for i in order]), strict=True)) if order else {}
    return torch.cat([gathered[:0], *(by_image[i] for i in range(len(grids)))])


def splice(rows: Tensor, token_ids: Tensor, placeholder: int, features: Tensor) -> Tensor:
    """rows [T, H], embeddings of token_ids [T], with those of `placeholder` replaced by features [n, H] in order.

    Raises ValueError unless there are n placeholders.
    """
    place = token_ids == placeholder
    if (found := int(place.sum())) != len(features):
        raise ValueError(
            f"the prompt has {found} placeholder tokens ({placeholder}) for {len(features)} image features: each image "
            "takes as many as it has features"
        )
    rows = rows.clone()
    rows[place] = features.to(rows)
    return rows


def _shares(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Which images each rank takes: the largest first, each to the rank with the least to do so far."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = loads.index(min(loads))
        shares[rank].append(i)
        loads[rank] += sizes[i]
    return shares


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn neighbouring pairs of x [P, h, d], taken as complex numbers, by rotation [2, P, d / 2]: cosines, sines."""
    cosine, sine = rotation.unsqueeze(2)
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([first * cosine - second * sine, first * sine + second * cosine], dim=-1)
    return turned.flatten(-2).to(x.dtype)


def _rotations(grid: Grid, head_dim: int) -> Tensor:
    """Cosines and sines [2, t * rows * columns, d / 2]: even pairs turn with the column, odd pairs with the row."""
    frames, rows, columns = grid
    steps = ROPE_THETA ** -(torch.arange(0, head_dim, 4).float() / head_dim)  # [d / 4]
    column = torch.arange(columns).repeat(rows).unsqueeze(-1) * steps
    row = torch.arange(rows).repeat_interleave(columns).unsqueeze(-1) * steps
    angles = torch.stack([column, row], dim=-1).flatten(-2).repeat(frames, 1)
    return torch.stack([angles.cos(), angles.sin()])


def _frame_waves(frames: int, width: int) -> Tensor:
    """Sines then cosines over the frame number, [frames, width]."""
    steps = ROPE_THETA ** -(torch.arange(0, width, 2).float() / width)
    angles = torch.arange(frames).unsqueeze(-1) * steps
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def _merge(x: Tensor, grid: Grid, merge: tuple[int, int]) -> Tensor:
    """[t * rows * columns, D] -> [rows * columns / area, area, D]: mean over frames, then blocks of neighbours."""
    frames, rows, columns = grid
    height, width = merge
    pooled = x.view(frames, rows, columns, -1).mean(dim=0)
    blocks = pooled.view(rows // height, height, columns // width, width, -1).transpose(1, 2)
    return blocks.reshape(-1, height * width, x.shape[-1])
