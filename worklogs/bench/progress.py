"""One line on stderr that says how far a run is; where stderr is no terminal, a line every half minute."""
import sys
import time

WIDTH, EVERY_S = 24, 30.0


class Progress:
    """Of `total` steps, `before` of which were done in an earlier run."""

    def __init__(self, total: int, enabled: bool = True, before: int = 0) -> None:
        self._total, self._enabled, self._before = max(1, total), enabled, before
        self._start = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._told = self._start

    def show(self, done: int, words: str = "") -> None:
        """done: steps, those before included."""
        now = time.monotonic()
        if not self._enabled or (not self._terminal and now - self._told < EVERY_S and done < self._total):
            return
        self._told = now
        full = WIDTH * done // self._total
        line = f"[{'#' * full}{'.' * (WIDTH - full)}] {done}/{self._total}{self._left(done, now)} {words}".rstrip()
        print(f"\r\033[K{line[:150]}" if self._terminal else line, end="" if self._terminal else "\n", file=sys.stderr,
              flush=True)

    def close(self) -> None:
        """Leaves the line empty for what is printed next."""
        if self._enabled and self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def _left(self, done: int, now: float) -> str:
        new = done - self._before
        if new <= 0 or done >= self._total:
            return ""
        seconds = round((now - self._start) / new * (self._total - done))
        return f", about {seconds // 60}:{seconds % 60:02d} left"
