"""The tokenizer of a checkpoint folder, for commands that take text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from kimi_k3_npu.errors import KimiK3Error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WAY_OUT = "--token-ids works without one"


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in `folder` with transformers. Code in the folder is not run.

    Raises:
        KimiK3Error: There is none, or it cannot be loaded.
    """
    settings = folder / "tokenizer_config.json"
    if not settings.is_file() and not (folder / "tokenizer.json").is_file():
        raise KimiK3Error(
            f"{folder}: no tokenizer (tokenizer.json or tokenizer_config.json) in this folder; {_WAY_OUT}"
        )
    try:
        own_code = settings.is_file() and "auto_map" in json.loads(settings.read_text(encoding="utf-8"))
    except ValueError as error:
        raise KimiK3Error(f"{settings}: not valid JSON ({error}); {_WAY_OUT}") from None
    if own_code:
        raise KimiK3Error(f"{folder}: its tokenizer is Python code in the folder, which is not run; {_WAY_OUT}")

    from transformers import AutoTokenizer

    # Registers kimi_k3, without which transformers warns about an unknown kind of model.
    import kimi_k3_npu.engines.transformers  # noqa: F401

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers library raises nothing more specific for a broken tokenizer.json
        raise KimiK3Error(f"{folder}: cannot load its tokenizer: {error}; {_WAY_OUT}") from None
