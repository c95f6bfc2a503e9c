"""A stand-in for the deep_ep package, as SGLang's dispatcher uses it on Ascend, over any torch.distributed backend.

Both forms of dispatch deliver rows sorted by local expert, one row a pair of token and expert, and how many each expert
got: normal as a list, low latency as a tensor beside a buffer with room to spare, which holds NaN past the rows. Both
forms of combine apply the router's weights.
"""

import torch
import torch.distributed as dist

#: Rows of the low-latency buffer beyond those that arrived.
SPARE = 5


class Event:
    def current_stream_wait(self):
        pass


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes, ranks):
        return 0

    def get_rdma_buffer_size_hint(self, hidden_bytes, ranks):
        return 0


class Buffer:
    num_sms = 20

    def __init__(self, group, num_nvl_bytes, num_rdma_bytes, low_latency_mode, num_qps_per_rank, **options):
        self.group, self.low_latency_mode = group, low_latency_mode
        self.group_size, self.rank = group.size(), group.rank()

    @staticmethod
    def capture():
        return Event()

    @staticmethod
    def get_dispatch_config(ranks):
        return Config()

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(num_max_tokens, hidden, ranks, num_experts):
        return 0

    def clean_low_latency_buffer(self, num_max_tokens, hidden, num_experts):
        pass

    def get_dispatch_layout(self, topk_ids, num_experts, **options):
        return None, None, torch.zeros(num_experts), None, Event()

    def dispatch(self, x, *, topk_idx, topk_weights, num_tokens_per_expert, quant_mode="int8", **options):
        assert quant_mode == "bf16", "rows travel unquantised"
        rows, counts, handle = self._exchange(x, topk_idx, topk_weights, len(num_tokens_per_expert))
        return rows, topk_idx, topk_weights, counts, handle, Event()

    def combine(self, x, handle, **options):
        return self._return(x, handle), None, Event()

    def low_latency_dispatch(
        self, x, topk_idx, num_max_tokens, num_experts, *, use_fp8, topk_weights, async_finish, return_recv_hook
    ):
        assert not use_fp8, "rows travel unquantised"
        assert len(x) <= num_max_tokens
        rows, counts, handle = self._exchange(x, topk_idx, topk_weights, num_experts)
        buffer = x.new_full((len(rows) + SPARE, x.shape[1]), float("nan"))
        buffer[: len(rows)] = rows
        return buffer, torch.tensor(counts, dtype=torch.int32), handle, Event(), lambda: None

    def low_latency_combine(self, *, x, topk_idx, topk_weights, handle, **options):
        return self._return(x, handle), Event(), lambda: None

    def _exchange(self, x, ids, weights, num_experts):
        everyone = [None] * self.group_size
        dist.all_gather_object(everyone, (x, ids, weights), group=self.group)
        held = num_experts // self.group_size
        experts = range(self.rank * held, (self.rank + 1) * held)
        # (sender, its row, weight), by expert
        arrived = [
            [(sender, t, weights[t, j]) for sender, (_, ids, weights) in enumerate(everyone) for t, j in _pairs(ids, e)]
            for e in experts
        ]
        pairs = [pair for each in arrived for pair in each]
        rows = torch.stack([everyone[sender][0][t] for sender, t, _ in pairs]) if pairs else x[:0]
        return rows, [len(each) for each in arrived], (pairs, len(x))

    def _return(self, results, handle):
        pairs, tokens = handle
        everyone = [None] * self.group_size
        dist.all_gather_object(everyone, (results[: len(pairs)], pairs), group=self.group)
        total = results.new_zeros(tokens, results.shape[1], dtype=torch.float32)
        for theirs, their_pairs in everyone:
            for row, (sender, t, weight) in zip(theirs, their_pairs, strict=True):
                if sender == self.rank:
                    total[t] += row.float() * weight
        return total.to(results.dtype)


def _pairs(ids, expert):
    return (ids == expert).nonzero().tolist()
