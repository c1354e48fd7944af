"""What a person would read, from any thread, to be waited for."""

from __future__ import annotations

import threading

from tt_cli.supervisor.events import Event, Log

MOST = 60.0  # seconds that a test waits for what must come


class Told:
    """Lines in order, and the level of each. Called with a Log, or with a line and its level."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.levels: list[str] = []
        self._news = threading.Condition()

    def __call__(self, what: Event | str, level: str = "") -> None:
        assert isinstance(what, str | Log)
        with self._news:
            self.lines.append(what if isinstance(what, str) else what.message)
            self.levels.append(level if isinstance(what, str) else what.level)
            self._news.notify_all()

    def found(self, words: str) -> list[str]:
        """All lines with these words."""
        return [line for line in self.lines if words in line]

    def wait(self, words: str, times: int = 1) -> str:
        """The last of so many lines with these words, once they are there."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.found(words)) >= times, MOST), self.lines
            return self.found(words)[-1]
