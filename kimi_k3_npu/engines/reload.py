"""Other weights for a running model, on all ranks or on none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.engines.weights import Source, check
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reload:
    """What an engine does of it.

    Args:
        network: The running network.
        open: Opens what a path names, for the network's configuration.
        load: Fills the network.
        agree: Given what is wrong on this rank, says what is wrong on any; "" is nothing. All ranks call it alike.
    """

    network: KimiK3ForCausalLM
    open: Callable[[str, KimiK3Config], Source]
    load: Callable[[Source], None]
    agree: Callable[[str], str]

    def __call__(self, path: str, served: str) -> str:
        """Load `path` in place of `served`. Returns "", or what was wrong and what is served now.

        What shows before weights are read is found before anything changes. Weights change in place wherever the device
        can do that; see `addresses`.

        Raises:
            RuntimeError: The network holds neither: also the weights of `served` cannot be read any more.
        """
        source, problem = self._open(path)
        if problem := self.agree(problem):
            return f"{problem}. Nothing was changed; still serving {served}."
        if problem := self.agree(self._load(source)):
            _log.error("%s; going back to %s", problem, served)
            former, reason = self._open(served)
            if back := self.agree(reason or self._load(former)):
                raise RuntimeError(f"{problem}; and the weights served before cannot be read again: {back}")
            return f"Failed to update weights: {problem}. Still serving {served}."
        return ""

    def _open(self, path: str) -> tuple[Source | None, str]:
        """The weights of `path`, which nothing is changed by, or what keeps them from being loaded."""
        try:
            source = self.open(path, self.network.config)
            if difference := _difference(self.network, source):
                return None, f"{path} is another network than the one that runs: {difference}"
            check(self.network, source)
        except Exception as error:  # whatever it is, the ranks must agree on what to do
            _log.exception("opening %s failed", path)
            return None, str(error)
        return source, ""

    def _load(self, source: Source | None) -> str:
        """Load and return "", or what is wrong."""
        assert source is not None
        try:
            self.load(source)
        except Exception as error:  # as above
            _log.exception("loading %s failed", source.checkpoint.folder)
            return str(error)
        return ""


def addresses(network: KimiK3ForCausalLM) -> tuple[int, ...]:
    """Where what a captured graph reads lies: a graph captured with others must be captured again."""
    return tuple(tensor.data_ptr() for tensor in (*network.parameters(), *network.buffers()))


def _difference(network: KimiK3ForCausalLM, source: Source) -> str:
    new = KimiK3Config.from_pretrained(source.checkpoint.folder)
    parts = ("text", "vision") if network.vision_tower is not None else ("text",)
    changed = [part for part in parts if getattr(network.config, part) != getattr(new, part)]
    if changed:
        return f"its config.json differs in {' and '.join(changed)}"
    if source.experts != network.experts:
        return f"its experts would be kept as {source.experts}, not as {network.experts}"
    return ""
