"""What a check of a launch has to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """`check` names the check, `fix` says what would help."""

    level: Level
    check: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.level} [{self.check}]: {self.text}" + (f"; {self.fix}" if self.fix else "")
