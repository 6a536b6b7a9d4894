"""Tells a model's reasoning from its answer while the text comes."""

from __future__ import annotations

from router_service.detokenise import overlap


class ReasoningSplitter:
    """Text up to `end` is reasoning, the rest is the answer; `end` itself, cut anywhere, is neither."""

    def __init__(self, end: str, *, thinks: bool) -> None:
        self._end = end
        self._thinks = thinks
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Reasoning and answer that may be shown now."""
        if not self._thinks:
            return "", text
        text = self._held + text
        reasoning, found, answer = text.partition(self._end)
        if found:
            self._thinks, self._held = False, ""
            return reasoning, answer
        keep = overlap(text, self._end)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], ""

    def finish(self) -> str:
        """Reasoning that was kept back and turned out to be no part of `end`."""
        held, self._held = self._held, ""
        return held
