"""One process of a launch, as the checks and the report look at it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import cached_property

from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.errors import LayoutError
from kimi_k3_npu.ops.device import Device, parse_cann
from kimi_k3_npu.ops.limits import SGL_KERNEL_NPU
from kimi_k3_npu.plan.choices import LayerKernel, Phase, Situation, expert_kernel, layer_kernels
from kimi_k3_npu.plan.finding import Finding
from kimi_k3_npu.plan.formats import EXPERT_FORMS, expert_group
from kimi_k3_npu.plan.memory import GIB, Memory, memory
from kimi_k3_npu.plan.values import value_faults
from kimi_k3_npu.recipes.launch import Launch
from kimi_k3_npu.recipes.schema import CheckpointFormat
from kimi_k3_npu.recipes.serving import Serving, serving

#: Tokens that a replica's cache is taken to have room for, where kernels ask: 29 GB in K3.
POOL_TOKENS = 1 << 20


@dataclass
class Subject:
    """One process of a launch, and what follows from it. `reserved` are bytes of a die that the engine never sees."""

    launch: Launch
    config: KimiK3Config
    reserved: int = 0
    extra_weights: int = 0
    #: Whether memory is worked out, which takes seconds.
    deep: bool = True
    #: Instead of what the flags say, for a plan without a recipe.
    given: Serving | None = None
    _layout_error: LayoutError | None = field(default=None, init=False)

    @cached_property
    def value_faults(self) -> list[Finding]:
        """Values that cannot be computed with."""
        return list(value_faults(self.launch))

    @cached_property
    def serving(self) -> Serving | None:
        """None when the flags do not make a layout, or there is no model in this process."""
        if not self.launch.role.nodes or self.value_faults:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = self.given or serving(self.launch)
                found.layout.check(self.config.text, expert_group=expert_group(self.form))
        except LayoutError as error:
            self._layout_error = error
            return None
        return found

    @property
    def layout_error(self) -> LayoutError | None:
        _ = self.serving
        return self._layout_error

    @property
    def form(self) -> CheckpointFormat:
        return self.launch.recipe.checkpoint.format

    @property
    def engine(self) -> str:
        return self.launch.recipe.engine.name

    @cached_property
    def device(self) -> Device:
        """The die, with the kernel package that the engines' images bring."""
        hardware = self.launch.recipe.hardware
        if hardware.cann is None:
            return Device("cpu")
        return Device(hardware.soc, parse_cann(hardware.cann), frozenset({SGL_KERNEL_NPU}))

    @property
    def passes(self) -> list[tuple[Phase, int]]:
        """The kinds of pass that the role has, and the tokens of a replica in the largest of each."""
        of = self.serving
        assert of is not None
        sizes: list[tuple[Phase, int]] = [("prefill", of.chunk), ("decode", of.decode_rows)]
        return [(phase, tokens) for phase, tokens in sizes if tokens and of.phase in ("both", phase)]

    def kernels(self, phase: Phase, tokens: int) -> list[LayerKernel]:
        """What a pass of that kind takes, without the kernels that depend on how weights are stored."""
        rows = layer_kernels(self.config.text, self._situation(tokens))
        return [row for row in rows if row.phase in ("any", phase)]

    def expert_kernel(self, tokens: int) -> LayerKernel | None:
        """What the routed experts, if there are any, take in the format of the checkpoint."""
        return expert_kernel(self.config.text, self._situation(tokens), EXPERT_FORMS[self.form])

    def _situation(self, tokens: int) -> Situation:
        of = self.serving
        assert of is not None
        context = max(1, min(of.context, POOL_TOKENS // tokens))
        return Situation(tokens, of.layout, self.device, context=context)

    @cached_property
    def memory(self) -> list[Memory]:
        """Of a rank of each pipeline stage; nothing without device memory."""
        total = self.launch.recipe.hardware.memory_gib_per_die
        if self.serving is None or total is None:
            return []
        return [
            memory(
                self.config,
                self.serving,
                self.form,
                total=int(total * GIB) - self.reserved,
                stage=stage,
                extra_weights=self.extra_weights,
                device=self.device,
            )
            for stage in range(self.serving.layout.pp)
        ]
