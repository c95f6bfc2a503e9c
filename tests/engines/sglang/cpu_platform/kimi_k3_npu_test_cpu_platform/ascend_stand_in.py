"""SGLang's NPU attention backend as a model sees it: the same calls and the same demands, computed by plain torch.

The shapes, who writes the cache, and what is refused follow SGLang 0.5.23's hardware_backend/npu/attention/
ascend_backend.py. Decode has static shapes and never looks at a tensor's values, like the graph that the NPU captures.
"""

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend


class AscendStandIn(TorchNativeAttnBackend):
    def __init__(self, model_runner):
        super().__init__(model_runner)
        config = model_runner.model_config.hf_text_config
        self.R, self.r = config.kv_lora_rank, config.qk_rope_head_dim
        self.n, self.v = config.qk_nope_head_dim, config.v_head_dim
        pool = self.token_to_kv_pool.full_kv_pool
        write = pool.set_kv_buffer

        def set_kv_buffer(layer, loc, latent, rope, *scales, **options):
            """The NPU's pool keeps latents and ropes apart; the portable one keeps their concatenation."""
            check(latent, (None, 1, self.R), "k written")
            check(rope, (None, 1, self.r), "k_rope written")
            write(layer, loc, torch.cat([latent, rope], dim=-1), latent, *scales, **options)

        pool.set_kv_buffer = set_kv_buffer

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, q_rope=None, k_rope=None):
        assert (q_rope, k_rope) == (None, None), "only the expanded form is taken in prefill"
        assert not save_kv_cache, "prefill does not write the cache: the model must have"
        assert layer.qk_head_dim - self.r == layer.v_head_dim, "queries are split at the value width"
        tokens, heads = q.shape[0], layer.tp_q_head_num
        check(q, (tokens, heads, self.n + self.r), "q")
        check(k, (tokens, heads, self.n + self.r), "k")
        check(v, (tokens, heads, self.v), "v")
        outputs, start = [], 0
        for row, (new, prefix) in enumerate(
            zip(forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu, strict=True)
        ):
            own = slice(start, start + new)
            keys, values = self.cached(layer, forward_batch.req_pool_indices[row], prefix)
            keys, values = torch.cat([keys, k[own]]), torch.cat([values, v[own]])
            scores = torch.einsum("qhd,khd->hqk", q[own], keys) * layer.scaling
            ahead = torch.ones(new, prefix + new, dtype=torch.bool).triu(prefix + 1)
            outputs.append(
                torch.einsum("hqk,khd->qhd", scores.masked_fill(ahead, float("-inf")).softmax(dim=-1), values)
            )
            start += new
        return torch.cat([*outputs, v.new_zeros(tokens - start, heads, self.v)])

    def cached(self, layer, request, prefix):
        """Keys and values of a cached prefix, made by the layer as the backend calls it: [blocks, page, 1, R] in."""
        rows = self.token_to_kv_pool.get_key_buffer(layer.layer_id)[
            self.req_to_token_pool.req_to_token[request, :prefix].long()
        ]
        both = layer.kv_b_proj(rows[:, None, :, : self.R])[0].view(-1, layer.tp_k_head_num, self.n + self.v)
        keys, values = both.split([self.n, self.v], dim=-1)
        rope = rows[:, :, self.R :].expand(-1, layer.tp_k_head_num, -1)
        return torch.cat([keys, rope], dim=-1), values

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, q_rope=None, k_rope=None):
        assert save_kv_cache, "decode writes the cache"
        tokens, heads = q.shape[0], layer.tp_q_head_num
        check(q, (tokens, heads, self.R), "q")
        check(k, (tokens, 1, self.R), "k")
        check(q_rope, (tokens, heads, self.r), "q_rope")
        check(k_rope, (tokens, 1, self.r), "k_rope")
        for x in (q, k, q_rope, k_rope):
            assert x.is_contiguous(), "the backend views its operands"
        self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, k_rope)
        slots = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices]  # [S, longest context]
        rows = self.token_to_kv_pool.get_key_buffer(layer.layer_id)[slots.long()].squeeze(2)  # [S, L, R + r]
        scores = torch.einsum("shd,sld->shl", torch.cat([q, q_rope], dim=-1), rows) * layer.scaling
        beyond = torch.arange(rows.shape[1]) >= forward_batch.seq_lens[:, None, None]
        weights = scores.masked_fill(beyond, float("-inf")).softmax(dim=-1)
        return torch.einsum("shl,sld->shd", weights, rows[..., : self.R]).reshape(tokens, heads * self.R)


def check(x, shape, name):
    fits = x is not None and x.dim() == len(shape)
    fits = fits and all(want in (None, size) for want, size in zip(shape, x.shape, strict=True))
    assert fits, f"{name} is {None if x is None else list(x.shape)}, must be {shape}"
