"""How the engine says no."""


class Refused(Exception):
    """The engine will not go on, and has changed nothing or undone it. One line per reason; each says what to do."""

    def __init__(self, *reasons: str) -> None:
        super().__init__("\n".join(reasons))
        self.reasons = reasons
