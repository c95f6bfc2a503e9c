"""Where the data files are: at the top of a source checkout, inside the package once installed."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def resource_path(*parts: str) -> Path:
    """The path of a data file or folder, as in `resource_path("weights", "manifests")`; it need not exist.

    A checkout is told by the pyproject.toml beside the package: an installed package's neighbours belong to others.
    """
    checkout = _PACKAGE.parent
    root = checkout if (checkout / "pyproject.toml").is_file() else _PACKAGE / "data"
    return root.joinpath(*parts)
