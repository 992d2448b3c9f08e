"""Texts of the code in the language of a page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Mapping

_CHINESE = Path(__file__).with_name("chinese.yaml")


@dataclass(frozen=True)
class Language:
    """One language.

    Attributes:
        translations: a text by its English; None for English itself.
    """

    translations: Mapping[str, str] | None

    @classmethod
    def english(cls) -> Language:
        """Return English."""
        return cls(None)

    @classmethod
    def chinese(cls) -> Language:
        """Return Chinese, from ``chinese.yaml``."""
        return cls(yaml.safe_load(_CHINESE.read_text("utf-8")))

    def listed(self, title: str, what: Iterable[str]) -> str:
        """Return a title and a list in this language's punctuation."""
        colon, comma = (": ", ", ") if self.translations is None else ("：", "、")  # noqa: RUF001
        return f"{self(title)}{colon}{comma.join(what)}"

    def __call__(self, english: str) -> str:
        """Return a text of the code in this language.

        Raises:
            KeyError: it has no translation yet, or its English has changed.
        """
        if self.translations is None or not english:
            return english
        try:
            return self.translations[english]
        except KeyError:
            raise KeyError(f"{_CHINESE.name} has no Chinese for {english!r}") from None
