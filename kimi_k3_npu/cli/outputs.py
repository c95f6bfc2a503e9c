"""Options that say where to write, checked while the command line is read: not after an hour of work."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer


def file(path: Path | None) -> Path | None:
    """A file to write, new or not, in a folder that is there. For `typer.Option(callback=...)`."""
    if path is not None:
        with _as_usage():
            _check_file(path)
            _check_folder(path.parent, path)
    return path


def file_with_folders(path: Path | None) -> Path | None:
    """A file to write, new or not; folders on the way to it are made."""
    if path is not None:
        with _as_usage():
            _check_file(path)
            _check_folder(_first_there(path.parent), path)
    return path


def folder(path: Path) -> Path:
    """A folder to write into; it and those on the way to it are made."""
    with _as_usage():
        if path.exists() and not path.is_dir():
            raise typer.BadParameter(f"{path}: is a file; give a folder to make")
        _check_folder(_first_there(path), path)
    return path


@contextmanager
def _as_usage() -> Iterator[None]:
    """What the system says about a path, such as that its name is too long, is wrong usage too."""
    try:
        yield
    except OSError as error:
        raise typer.BadParameter(f"{error.filename}: {error.strerror}") from None


def _first_there(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists."""
    return next(above for above in (path, *path.parents, Path()) if above.exists())


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise typer.BadParameter(f"{path}: is a folder; give a file to write")
    if path.exists() and not os.access(path, os.W_OK):
        raise typer.BadParameter(f"{path}: may not be written to")


def _check_folder(folder: Path, path: Path) -> None:
    if not folder.exists():
        raise typer.BadParameter(f"{path}: there is no folder {folder}; make it, or write elsewhere")
    if not folder.is_dir():
        raise typer.BadParameter(f"{path}: {folder} is no folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"{path}: in folder {folder} nothing may be written")
