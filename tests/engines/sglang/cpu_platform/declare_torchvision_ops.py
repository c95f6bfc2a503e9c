"""Make the environment's torchvision importable beside a CPU build of torch. Run once, with that environment's Python.

PyPI's torchvision is compiled for CUDA. Beside a CPU torch its extension does not load, and `import torchvision` stops
where it registers Meta functions for operators that the extension would have declared. This appends those declarations,
without kernels, to the module that tries to load the extension. SGLang uses torchvision's image transforms, which need
no kernels.
"""

from importlib.util import find_spec
from pathlib import Path

MARKER = "# kimi-k3-npu tests: operators of the extension that could not be loaded"
DECLARATIONS = f"""

{MARKER}
if not _has_ops():
    _declared = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _declared.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> None:
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise SystemExit("torchvision is not installed in this environment")
    extension = Path(spec.origin).with_name("extension.py")
    source = extension.read_text(encoding="utf-8")
    if MARKER not in source:
        extension.write_text(source + DECLARATIONS, encoding="utf-8")


if __name__ == "__main__":
    main()
