"""The ranks of the tests that need several: each runs every case of a list together with the others.

usage: worker.py WORLD FOLDER [--emulate-npu]

FOLDER has cases.json; a case is an object whose "what" names a function here, the rest are its arguments. Rank 0 writes
what all ranks return to results.json, and each rank what it prints to a log. Imports take longer than most cases, so
they are done once and the ranks are forked. Ends with an error as soon as one rank does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from kimi_k3_npu import load_model
from kimi_k3_npu.errors import LaunchError, LayoutError
from kimi_k3_npu.model.attention import CachedAttention
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
from kimi_k3_npu.model.moe import DispatchedMoE, GatheredMoE
from kimi_k3_npu.model.vocabulary import VocabularyTable
from kimi_k3_npu.ops.op import CHOSEN
from kimi_k3_npu.parallel.agreement import problems_of_all
from kimi_k3_npu.parallel.experts import AllToAll, ExpertDispatch, Mc2
from kimi_k3_npu.parallel.groups import Group
from kimi_k3_npu.parallel.layout import ParallelLayout
from kimi_k3_npu.parallel.mesh import Mesh
from tests.parallel.launch import log_of
from tests.patience import PATIENCE

EMULATE_NPU = "--emulate-npu" in sys.argv
ORACLES = Path(__file__).parents[1] / "oracle"


def prompts_of(oracle: str) -> list[tuple[Tensor, Tensor]]:
    """Every prompt of an oracle with its expected logits."""
    expected = load_file(ORACLES / oracle / "expected.safetensors")
    count = sum(name.endswith("input_ids") for name in expected)
    return [(expected[f"prompt{i}.input_ids"], expected[f"prompt{i}.logits"]) for i in range(count)]


def score(oracle: str, layout: str, break_it: str | None = None, mc2_rows: int | None = None) -> dict[str, Any]:
    """The largest logit difference on this rank, the bytes of its model, and which dispatch it took.

    All prompts run on the first replica while the others are idle; then they are dealt out unevenly; then none runs.
    break_it: A name of BREAKAGES, applied to the loaded model. mc2_rows: As the emulated operators' limit.
    """
    parsed = ParallelLayout.parse(layout)
    model = load_model(ORACLES / oracle, layout=parsed)
    replica, replicas = model.mesh.dp.rank, parsed.dp
    prompts = prompts_of(oracle)
    passes = [prompts if replica == 0 else []]
    if replicas > 1:
        passes += [prompts[:1] if replica == replicas - 1 else prompts[1:] if replica == 0 else [], []]
    CHOSEN.clear()
    worst = 0.0
    with BREAKAGES[break_it](model) if break_it else nullcontext(), _emulation(rows=mc2_rows):
        for mine in passes:
            for scored, (_, logits) in zip(model.score([ids for ids, _ in mine]), mine, strict=True):
                worst = max(worst, (scored - logits).abs().max().item())
    return {
        "worst": worst,
        "bytes": sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())),
        "dispatch": sorted(kernel for op, kernel in CHOSEN if op == "moe_dispatch"),
    }


def held(folder: str, layout: str) -> dict[str, int]:
    """Bytes of each parameter and buffer of this rank's model."""
    model = load_model(folder, layout=ParallelLayout.parse(layout))
    return {path: tensor.nbytes for path, tensor in (*model.named_parameters(), *model.named_buffers())}


def disagree(oracle: str, layout: str, tokens: list[int]) -> str:
    """The message that this rank raises when each rank runs its own number of tokens."""
    model = load_model(ORACLES / oracle, layout=ParallelLayout.parse(layout))
    mine = tokens[dist.get_rank()]
    attention = CachedAttention(cache := model.new_cache(1, 8), [cache.join()], [mine])
    try:
        model(torch.zeros(mine, dtype=torch.long), attention)
    except LayoutError as error:
        return str(error)
    return "nothing was raised"


def collectives(counts: list[int]) -> dict[str, Any]:
    """Every collective of one group over all ranks. Row j of rank r is [100 r + j, -1], for counts[r] rows."""
    group, rank = _world(), dist.get_rank()

    def rows(of: int, n: int) -> Tensor:
        return torch.stack([100 * of + torch.arange(n), torch.full((n,), -1)], dim=1)

    total = sum(counts)
    # Rank r sends (r + receiver) % 3 rows, so that some pairs exchange nothing.
    sent = [(rank + other) % 3 for other in range(group.size)]
    received = group.exchange_counts(torch.tensor(sent)).tolist()
    return {
        "all_reduce": group.all_reduce(rows(rank, total)).tolist(),
        "all_gather": group.all_gather(rows(rank, counts[rank]), counts).tolist(),
        "all_gather_nothing_wide": list(group.all_gather(torch.empty(counts[rank], 0), counts).shape),
        "reduce_scatter": group.reduce_scatter(rows(rank, total), counts).tolist(),
        "received": received,
        "all_to_all": group.all_to_all(rows(rank, sum(sent)), sent, received)[:, 0].tolist(),
        "gather_value": group.gather_value(7 * rank, torch.device("cpu")),
        "bounds": [group.bounds(counts).start, group.bounds(counts).stop],
    }


def dispatch(
    how: str, rows: list[int], ids: str, soc: str = "a3", num_experts: int = 6, top_k: int = 2
) -> dict[str, Any]:
    """An expert dispatch on random rows against what it should give; expert e multiplies its rows by e + 1.

    ids: "random", or "one" for one and the same first expert for every token.
    """
    torch.manual_seed(dist.get_rank())
    n = rows[dist.get_rank()]
    z, weights = torch.randn(n, 8), torch.rand(n, top_k)
    scores = torch.rand(n, num_experts)
    if ids == "one":
        scores[:, num_experts - 1] = 2.0
    chosen = scores.topk(top_k).indices
    held = num_experts // dist.get_world_size()
    first = held * dist.get_rank()
    seen = 0

    def experts(x: Tensor, w: Tensor, e: Tensor) -> Tensor:
        nonlocal seen
        here = (e >= first) & (e < first + held)
        seen += int(here.sum())
        factor = (torch.where(here, w * (e + 1), 0.0)).sum(1, keepdim=True)
        return torch.where(here.any(1, keepdim=True), x * factor, 0.0)

    carrier: ExpertDispatch = AllToAll(_world(), num_experts)
    if how == "mc2":
        carrier = Mc2(_world(), num_experts, otherwise=carrier)
    with _emulation(soc):
        out = carrier(z, weights, chosen, experts, max(rows))
    wanted = z * (weights * (chosen + 1)).sum(1, keepdim=True)
    return {"shape": list(out.shape), "worst": (out - wanted).abs().max().item() if n else 0.0, "seen": seen}


def vocabulary(layout: str, vocab: int, counts: list[int]) -> dict[str, float]:
    """Differences of a split table from the whole one, when embedding and when scoring."""
    mesh = Mesh.distributed(ParallelLayout.parse(layout))
    torch.manual_seed(0)
    whole = torch.randn(vocab, 4)
    table = VocabularyTable(vocab, 4, mesh, torch.float32)
    (piece,) = table.pieces("weight").values()
    with torch.no_grad():
        table.weight[piece.target] = whole[piece.source]
    ids = torch.arange(counts[mesh.dp.rank]) % vocab
    hidden = torch.randn(len(ids), 4)
    with torch.inference_mode():
        embedded, logits = table.embed(ids, counts), table.logits(hidden, counts)
    wanted = hidden @ whole.T
    assert logits.shape == wanted.shape, (logits.shape, wanted.shape)
    return {
        "embed": (embedded - whole[ids]).abs().amax().item() if len(ids) else 0.0,
        "logits": (logits - wanted).abs().amax().item() if len(ids) else 0.0,
        "held": piece.numel,
    }


def groups_of_mc2(layout: str) -> list[str]:
    """The axes whose process group is also that of mc2, which must be alone on its own."""
    mesh = Mesh.distributed(ParallelLayout.parse(layout))
    shared = [
        name for name in ("tp", "ep", "shared", "vocab") if getattr(mesh, name).process_group is mesh.mc2.transport
    ]
    assert mesh.mc2.size == mesh.ep.size, (mesh.mc2.size, mesh.ep.size)
    return shared


def told(problems: list[str]) -> str:
    """What this rank hears of a problem of each."""
    return problems_of_all(problems[dist.get_rank()], dist.group.WORLD)


def refused_mesh(layout: str, buffers: list[str] | None = None) -> str:
    """The message with which every rank is refused: for a layout of another size, or for its own HCCL_BUFFSIZE."""
    own = {"HCCL_BUFFSIZE": buffers[dist.get_rank()]} if buffers else {}
    try:
        with patch.dict(os.environ, own):
            Mesh.distributed(ParallelLayout.parse(layout))
    except (LayoutError, LaunchError) as error:
        return str(error)
    return "nothing was raised"


@contextmanager
def norm_before_the_sum(model: KimiK3ForCausalLM) -> Iterator[None]:
    """Every rank norms what its own experts give, and the sum is not normed."""
    for moe in (module for module in model.modules() if isinstance(module, GatheredMoE)):
        norm, moe.routed_expert_norm = moe.routed_expert_norm, None
        moe.experts.register_forward_hook(lambda _, __, y, norm=norm: norm(y))
    yield


@contextmanager
def no_sum_over_attn_tp(model: KimiK3ForCausalLM) -> Iterator[None]:
    """The output projections' partial sums stay partial."""
    with patch.object(Group, "all_reduce", lambda group, x: x):
        yield


@contextmanager
def experts_of_another_rank(model: KimiK3ForCausalLM) -> Iterator[None]:
    """Rows go to a rank that does not hold their experts."""
    for module in model.modules():
        if isinstance(module, DispatchedMoE):
            module.experts.first = model.config.text.num_experts - module.experts.first - module.dispatch.held
    yield


BREAKAGES = {f.__name__: f for f in (norm_before_the_sum, no_sum_over_attn_tp, experts_of_another_rank)}
CASES = {
    f.__name__: f for f in (score, held, disagree, collectives, dispatch, vocabulary, groups_of_mc2, told, refused_mesh)
}


def _world() -> Group:
    return Group("world", dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


def _emulation(soc: str = "a3", rows: int | None = None) -> AbstractContextManager[None]:
    if not EMULATE_NPU:
        return nullcontext()
    from tests.npu.emulation import mc2

    return mc2.emulated(soc, rows)


def run(rank: int, world: int, folder: Path) -> None:
    """All cases, as `rank`."""
    store = dist.FileStore(str(folder / "rendezvous"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=PATIENCE))
    collected = []
    for case in json.loads((folder / "cases.json").read_text()):
        mine = CASES[case.pop("what")](**case)
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, mine)
        collected.append(everyone)
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(collected))
    dist.destroy_process_group()


def fork(rank: int, world: int, folder: Path) -> int:
    """The process id of a child that is `rank`. It leaves what the parent would clean up at its end alone."""
    if child := os.fork():
        return child
    code = 1
    try:
        log = os.open(log_of(folder, rank), os.O_WRONLY | os.O_CREAT)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log, stream.fileno())
        run(rank, world, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if EMULATE_NPU:
        from tests.npu.emulation import mc2

        mc2.prepare()
    ranks = {fork(rank, world, folder): rank for rank in range(world)}
    failed = None
    while ranks and failed is None:
        child, status = os.wait()
        rank = ranks.pop(child)
        failed = rank if status else None
    for child in ranks:
        os.kill(child, signal.SIGKILL)
    if failed is not None:
        print(f"rank {failed} of {world} failed:", log_of(folder, failed).read_text(), sep="\n", file=sys.stderr)
        sys.stderr.flush()
    # Not sys.exit: with no CANN behind it, torch_npu's static destructors abort now and then.
    os._exit(failed is not None)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
