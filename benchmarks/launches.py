"""How many kernels does one decode step of Kimi-K3 launch on an NPU, block by block? No NPU is needed to count.

The full-size model runs one step with the NPU kernels of this package on meta tensors: shapes without memory, on which
torch_npu's operators compute nothing. Every operator on the way is looked up in torch_npu's registrations:

    launch      it has an NPU kernel
    free        a view, metadata or allocation: the device is given nothing to do
    opened      it has no kernel but is composed of other operators, which are looked up in turn
    fallback    neither, so torch_npu copies its operands to the CPU and the result back; must not happen
    host copy   a tensor made from a Python list, which is sent to the device
    collective  counted beside the launches

One operator is one launch here, though some launch two kernels and most first copy an operand that is not contiguous.
What a process makes once is made before the step that is counted.

    .venv-npu/bin/python benchmarks/launches.py
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # without CANN, torch must not load torch_npu by itself

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch._C import DispatchKey, _dispatch_has_kernel_for_dispatch_key
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.config.published import published_config
from kimi_k3_npu.formats import FORMATS
from kimi_k3_npu.model.attention import CachedAttention
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
from kimi_k3_npu.ops import sgl
from kimi_k3_npu.ops.device import OPTIONAL_PACKAGES, Device, assume, parse_cann, parse_soc
from kimi_k3_npu.ops.op import CHOSEN, OPS
from kimi_k3_npu.parallel.groups import Group
from kimi_k3_npu.parallel.layout import ParallelLayout
from kimi_k3_npu.parallel.mesh import Mesh

#: Operators that reserve memory or change what is known about it. Views are told by their result.
FREE = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"),
    *("alias", "detach", "detach_", "lift_fresh"),
}
#: The ways in which an operator is composed of others.
COMPOSED = (
    DispatchKey.CompositeImplicitAutograd,
    DispatchKey.CompositeExplicitAutograd,
    DispatchKey.CompositeExplicitAutogradNonFunctional,
)
COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")

#: attn_tp is 16 in both; the second is how K3 is served on 64 dies.
LAYOUTS = ("tp=64,dp=4,ep=64", "tp=64,dp=4,ep=64,dispatch=mc2,shared=attn_tp,dense=attn_tp")
BATCH = 16
CONTEXT = 4096
RESULTS = Path(__file__).resolve().parent / "results" / "launches.json"
#: Sources of launches that are named in the table.
SHOWN = 6

KDA, MLA, MOE, DENSE = "KDA", "MLA", "MoE", "dense MLP"
AROUND, ENDS = "norms and mixers", "embedding and head"


@dataclass
class Count:
    """Launches by source and operator, and what is none: collectives and fallbacks by name, host copies."""

    launches: Counter[tuple[str, str]] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    host_copies: int = 0

    def add(self, other: Count) -> None:
        self.launches += other.launches
        self.collectives += other.collectives
        self.fallbacks += other.fallbacks
        self.host_copies += other.host_copies


class Counting(TorchDispatchMode):
    """Counts what runs inside the block into `count`, which may be exchanged meanwhile.

    The source of a launch is the operator of this package that it is part of, outside of any the operator itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = Count()
        self._sources: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name()
        operator = name.partition("::")[2].partition(".")[0]
        if func.namespace == "kimi_k3":
            self._sources.append(operator)
            with self:
                op = OPS[operator]
                result = (op.npu if op.kernels else op.reference)(*args, **kwargs)
            self._sources.pop()
            return result
        if operator in FREE or func.namespace == "prim":
            return func(*args, **kwargs)
        if _dispatch_has_kernel_for_dispatch_key(name, "PrivateUse1"):
            result = func(*args, **kwargs)
            if not (func.is_view and _same_memory(result, args[0])):
                self.add(operator)
            return result
        for key in COMPOSED:
            if _dispatch_has_kernel_for_dispatch_key(name, key.name):
                with self:
                    return func._op_dk(key, *args, **kwargs)
        self.count.fallbacks[operator] += 1
        return func(*args, **kwargs)

    def add(self, operator: str) -> None:
        self.count.launches[self._sources[-1] if self._sources else operator, operator] += 1


class CountingHostCopies(TorchFunctionMode):
    """`torch.tensor` with a list, which no dispatch mode sees."""

    def __init__(self, counting: Counting) -> None:
        super().__init__()
        self._counting = counting

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tensor:
            self._counting.count.host_copies += 1
        return func(*args, **(kwargs or {}))


def _same_memory(result: Any, source: Any) -> bool:
    return result.untyped_storage()._cdata == source.untyped_storage()._cdata


@contextmanager
def package_counted(counting: Counting) -> Iterator[None]:
    """Stand in for sgl_kernel_npu, with each of its kernels one launch."""
    from tests.npu.emulation import with_sgl_kernel_npu

    def counted(find: Callable) -> Callable:
        def found(symbol: str) -> Callable:
            kernel = find(symbol)

            def launch(*arguments: Any, **options: Any) -> Any:
                counting.add(symbol.rpartition(".")[2])
                outside, counting.count = counting.count, Count()
                try:
                    return kernel(*arguments, **options)
                finally:
                    counting.count = outside

            return launch

        return found

    with (
        with_sgl_kernel_npu(),
        patch.object(sgl, "kernel", counted(sgl.kernel)),
    ):
        yield


@contextmanager
def collectives_counted(counting: Counting) -> Iterator[None]:
    """Let collectives do nothing but be counted."""

    def counted(name: str) -> Callable[..., None]:
        def collective(*_: object, **__: object) -> None:
            counting.count.collectives[name] += 1

        return collective

    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(patch(f"torch.distributed.{name}", counted(name)))
        stack.enter_context(patch("kimi_k3_npu.parallel.experts.communicator_name", lambda group: "counted"))
        yield


def inspected_mesh(layout: ParallelLayout) -> Mesh:
    """Rank 0's mesh, with groups that believe they have a transport."""
    mesh = Mesh.inspect(layout, 0)
    groups = {part.name: getattr(mesh, part.name) for part in fields(mesh)}
    transport: Any = object()
    connected: dict[str, Any] = {
        name: replace(group, process_group=transport) for name, group in groups.items() if isinstance(group, Group)
    }
    return replace(mesh, **connected)


def count_step(
    config: KimiK3Config, layout: ParallelLayout, batch: int, device: Device, experts: str = "plain"
) -> dict[str, list[Count]]:
    """Block -> what each of its occurrences launches in one decode step of `batch` sequences a replica."""
    counting = Counting()
    with torch.device("meta"):
        model = KimiK3ForCausalLM(config, inspected_mesh(layout), experts=experts, vision=False)
        cache = model.new_cache(batch, CONTEXT + 2)
        ids = torch.zeros(batch, dtype=torch.long)
    slots = [cache.join() for _ in range(batch)]
    cache.advance(slots, [CONTEXT] * batch)
    counts = [batch] * layout.dp
    with ExitStack() as stack:
        for mode in (
            torch.inference_mode(),
            assume(device),
            package_counted(counting) if device.packages else nullcontext(),
            collectives_counted(counting),
            CountingHostCopies(counting),
            counting,
        ):
            stack.enter_context(mode)
        for _ in ("what a process makes once", "the step that counts"):
            counting.count = Count()
            blocks = {ENDS: [counting.count]}
            with blocks_counted(model, counting, blocks):
                attention = CachedAttention(cache, slots, [1] * batch)
                model.logits(model(ids, attention, counts=counts), counts)
            attention.commit()
    return blocks


@contextmanager
def blocks_counted(model: KimiK3ForCausalLM, counting: Counting, blocks: dict[str, list[Count]]) -> Iterator[None]:
    """Give every block of every layer its own Count while its module runs."""
    outer: list[Count] = []

    def enter(block: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            outer.append(counting.count)
            counting.count = Count()
            blocks.setdefault(block, []).append(counting.count)

        return hook

    def leave(*_: object) -> None:
        counting.count = outer.pop()

    handles = []
    for index, layer in model.layers.items():
        kind = KDA if model.config.text.layer_kinds[int(index)] == "kda" else MLA
        feed_forward = MOE if model.config.text.is_moe(int(index)) else DENSE
        parts: dict[str, Any] = {AROUND: layer, kind: layer.self_attn, feed_forward: layer.mlp}
        for block, module in parts.items():
            handles += [module.register_forward_pre_hook(enter(block)), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def summary(blocks: dict[str, list[Count]]) -> dict[str, Any]:
    """The counts as they are kept in RESULTS: of the commonest occurrence of each block, and of the whole step."""
    step = Count()
    rows: dict[str, Any] = {}
    for block, counts in blocks.items():
        for count in counts:
            step.add(count)
        totals = [count.launches.total() for count in counts]
        usual = counts[totals.index(Counter(totals).most_common(1)[0][0])]
        rows[block] = {
            "occurrences": len(counts),
            "launches": usual.launches.total(),
            "least": min(totals),
            "most": max(totals),
            "collectives": usual.collectives.total(),
            "host_copies": usual.host_copies,
            "sources": by_source(usual),
        }
    return {
        "launches": step.launches.total(),
        "collectives": step.collectives.total(),
        "host_copies": step.host_copies,
        "fallbacks": dict(step.fallbacks),
        "blocks": rows,
    }


def by_source(count: Count) -> dict[str, dict[str, int]]:
    """Source -> operator -> launches, the largest first."""
    sources: dict[str, dict[str, int]] = {}
    for (source, operator), number in count.launches.most_common():
        sources.setdefault(source, {})[operator] = number
    return dict(sorted(sources.items(), key=lambda item: -sum(item[1].values())))


def table(title: str, counted: dict[str, Any]) -> Table:
    """One line a block, in the order of their share of the step."""
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("block", "times", "launches", "of the step", "collectives", "biggest contributors"):
        shown.add_column(column, justify="left" if column[0] == "b" else "right")
    rows = counted["blocks"].items()
    for block, row in sorted(rows, key=lambda item: -item[1]["occurrences"] * item[1]["launches"]):
        share = row["occurrences"] * row["launches"] / counted["launches"]
        sources = [f"{source} {sum(operators.values())}" for source, operators in row["sources"].items()]
        numbers = (row["occurrences"], row["launches"], f"{share:.0%}", row["collectives"])
        shown.add_row(block, *map(str, numbers), ", ".join(sources[:SHOWN]))
    shown.add_section()
    shown.add_row("the step", "1", str(counted["launches"]), "", str(counted["collectives"]), "")
    return shown


def load_torch_npu() -> None:
    """The real torch_npu, over a stand-in for CANN where there is none."""
    from tests.npu import conftest

    if not conftest.cann_is_installed():
        conftest.load_stand_in()
        conftest.open_meta_gates()
    import torch_npu  # noqa: F401  registers the operators


def titled(layout: str, device: Device, batch: int) -> str:
    packages = ", ".join(device.packages) or "torch_npu alone"
    return f"{layout}, batch {batch}, {device.soc}, CANN {device.cann}, {packages}"


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--layout", action="append", help="as in tp=64,dp=4,ep=64; may be repeated")
    options.add_argument("--batch", type=int, default=BATCH, help="sequences of each data-parallel replica")
    options.add_argument(
        "--experts",
        default="plain",
        choices=[name for name, each in FORMATS.items() if each.kept],
        help="how their weights are kept",
    )
    options.add_argument("--soc", default="a3")
    options.add_argument("--cann", default="9.1")
    options.add_argument("--out", type=Path, help=f"JSON file; {RESULTS.name} in results/ for the default settings")
    given = options.parse_args()
    if find_spec("torch_npu") is None:
        print("not counted: torch_npu is not installed here; `make env-npu`, then .venv-npu/bin/python", sys.argv[0])
        return
    load_torch_npu()
    console = Console(width=None if sys.stdout.isatty() else 150)
    results = {}
    for layout in given.layout or LAYOUTS:
        for packages in (frozenset[str](), frozenset(OPTIONAL_PACKAGES)):
            device = Device(parse_soc(given.soc), parse_cann(given.cann), packages)
            title = titled(layout, device, given.batch)
            ranks = ParallelLayout.parse(layout)
            try:
                blocks = count_step(published_config(), ranks, given.batch, device, given.experts)
            except NotImplementedError:  # a meta tensor was asked for its values
                composed = ", ".join(sorted(op for op, name in CHOSEN if name == "composed"))
                sys.exit(f"{title}: cannot be counted, the host waits for the device in one of: {composed}")
            results[title] = summary(blocks)
            console.print(table(title, results[title]))
    is_default = len(sys.argv) == 1
    if out := given.out or (RESULTS if is_default else None):
        out.parent.mkdir(exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n")
        print(f"wrote {out}")


if __name__ == "__main__":
    main()
