"""Run the tests of this folder against the real torch_npu, with or without an Ascend machine.

Where CANN is installed it is used. Elsewhere the libraries that make_cann_stub.py builds stand in for it: schemas,
argument checks and Meta functions are torch_npu's own, and whatever needs a device fails. Some Meta functions ask for
the chip and the CANN release; they are then told Ascend 910B3 and 9.1.0.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # `import torch` must not load torch_npu before CANN is there

CANN_RELEASE = "9.1.0"
SOC_ASCEND_910B3 = 223
BUILD_TOOLS = ("gcc", "readelf")
BUILD_SCRIPT = Path(__file__).with_name("make_cann_stub.py")

stand_in_key = pytest.StashKey[bool]()
skip_reason_key = pytest.StashKey[str]()
kept_libraries: list[object] = []  # a torch.library.Library that is collected takes its registrations along


def pytest_configure(config: pytest.Config) -> None:
    if find_spec("torch_npu") is None:
        raise pytest.UsageError("tests/npu needs an environment with torch_npu: run `make test-npu`")
    config.stash[stand_in_key] = not cann_is_installed()
    if config.stash[stand_in_key]:
        if missing := [tool for tool in BUILD_TOOLS if shutil.which(tool) is None]:
            reason = f"neither CANN nor what builds a stand-in for it: {' and '.join(missing)} not found"
            if os.environ.get("REQUIRE_ALL_TESTS") == "1":
                raise pytest.UsageError(reason)
            config.stash[skip_reason_key] = reason
            return
        load_stand_in()
        open_meta_gates()
    import torch_npu  # noqa: F401  registers the operators

    from tests.npu import evidence

    config.pluginmanager.register(evidence.Recorder(), evidence.NAME)


def cann_is_installed() -> bool:
    try:
        ctypes.CDLL("libascendcl.so")
    except OSError:
        return False
    return True


def load_stand_in() -> None:
    built = subprocess.run([sys.executable, BUILD_SCRIPT], check=True, stdout=subprocess.PIPE, text=True)
    for library in sorted(Path(built.stdout.strip()).glob("*.so")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def open_meta_gates() -> None:
    import torch
    import torch_npu.op_plugin.meta._meta_registrations as meta

    meta.get_cann_version = lambda module="CANN": CANN_RELEASE
    meta.get_soc_version = lambda: SOC_ASCEND_910B3

    # torch_npu ships no Meta function for this one; a format changes the layout in memory and nothing that Meta sees.
    library = torch.library.Library("npu", "IMPL")
    library.impl("npu_format_cast", lambda input, acl_format, **_: torch.empty_like(input), "Meta")
    kept_libraries.append(library)


class SkippedFile(pytest.File):
    """Stands for a test module that cannot even be imported here."""

    def collect(self) -> Iterator[pytest.Item]:
        yield SkippedItem.from_parent(self, name="all")


class SkippedItem(pytest.Item):
    def runtest(self) -> None:
        pytest.skip(self.config.stash[skip_reason_key])


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if skip_reason_key in parent.config.stash:
        return SkippedFile.from_parent(parent, path=module_path)
    return None


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("npu")


@pytest.fixture(scope="session")
def stand_in(pytestconfig: pytest.Config) -> bool:
    """Whether the CANN libraries are stand-ins, so that there is certainly no device."""
    return pytestconfig.stash[stand_in_key]


@pytest.fixture(autouse=True)
def nothing_chosen() -> None:
    """Tests lift limits and force kernels, so each chooses anew."""
    from kimi_k3_npu.ops.op import OPS

    for op in OPS.values():
        op.forget()


@pytest.fixture(autouse=True)
def inference_mode() -> Iterator[None]:
    """As in serving; torch_npu's operators then reach their kernels without passing through autograd."""
    import torch

    with torch.inference_mode():
        yield
