"""One line of ``goldilocks doctor``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """``remedy`` is what to do when it is not ok; only essential findings fail the command."""

    what: str
    ok: bool
    detail: str
    remedy: str = ""
    essential: bool = True

    def __str__(self) -> str:
        """``ok    what       detail``, with the remedy on a second line if the check failed."""
        word = "ok" if self.ok else "FAILS" if self.essential else "note"
        text = f"{word:<6}{self.what:<16}{self.detail}"
        return text if self.ok or not self.remedy else f"{text}\n{'':<22}→ {self.remedy}"
