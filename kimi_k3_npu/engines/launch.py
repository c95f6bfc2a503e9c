"""Whether a launch asks for this package's model, and the engine that it asks. Importing this loads no torch."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from kimi_k3_npu.engines import versions
from kimi_k3_npu.errors import LaunchError

try:
    from kimi_k3_npu.engines import guard as guard
except ImportError:  # a wheel has it at the top of site-packages, and there alone
    import _kimi_k3_npu_guard as guard  # type: ignore[no-redef]

#: What `--model-impl` must say.
IMPL: str = guard.IMPL


def is_ours(model_impl: Any) -> bool:
    """Whether this `--model-impl` is ours.

    Raises:
        LaunchError: It is, but for its spelling; the engine would take it for its own class.
    """
    if words := guard.misspelt(model_impl):
        raise LaunchError(words)
    return model_impl == IMPL


@dataclass(frozen=True)
class Engine:
    """An engine that this package is a plugin of.

    Args:
        name: What messages call it.
        package: Its distribution.
        tested: The version that the tests run.
        model_option: The option that names the model.
        images_option: The option that asks for images.
    """

    name: str
    package: str
    tested: str
    model_option: str
    images_option: str

    def installed(self) -> str | None:
        """The version in this environment."""
        return versions.installed(self.package)

    def find(self, path: str) -> Any:
        """What `module:attribute` names. Raises LaunchError if this version has no such thing."""
        module, attribute = path.split(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise LaunchError(
                f"{self.name} {self.installed() or '(not installed)'} has no {module}.{attribute} ({error}); this "
                f"plugin was tested with {self.name} {self.tested}"
            ) from error
