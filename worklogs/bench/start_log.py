"""What a server's log says of its start: phases, its own account of them, why it failed; and the log without what names
the machine."""
import os
import re
from typing import Any

from bench_record import without_paths

# In order. A phase ends with the (last, of several ranks) line that matches; the last two are seen from outside.
PHASES: tuple[tuple[str, str | None], ...] = (
    ("imports and configuration", r"^vllm overlay: .*back ends: "),
    ("engine process and imports", r"Initializing an LLM engine"),
    ("memory plan", r"Memory plan"),
    ("weights loaded", r"Loading model weights took|Recurrent state: \d+ slots"),
    ("KV cache made", r"Engine up after"),
    ("its own first token", r"Started in \d"),
    ("HTTP up", None),
    ("first token", None),
)
NAMES = tuple(name for name, _ in PHASES)
HTTP, TOKEN = NAMES[-2:]
LAST_LINES = 20
# How our server begins the line that says why it cannot start; lines that are searched where there is none.
ERROR, SEARCHED = "vllm: error: ", 60
# What the server says itself: "Started in 28.7 s: imports 13.4 s (47 %), ...".
_ACCOUNT = re.compile(r"(Engine up after|Started in) ([\d.]+) s: (.*)$")
_PART = re.compile(r"([^,]+?) ([\d.]+) s \(\d+ %\)(?:, |$)")
_COMMON = re.compile(r"\b(?!127\.|0\.0\.0\.0)\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}(?=:\d)")
# What a log or an exit status tells the operator to do; the first that fits.
ADVICE = (
    (r"does not fit|lower --max-",
     "the memory plan refuses: the line says which single settings would do; give one, as MAX_NUM_BATCHED_TOKENS=, "
     "MAX_NUM_SEQS=, MAX_MODEL_LEN= or GPU_MEMORY_UTILIZATION="),
    (r"cannot listen on|[Aa]ddress already in use", "another process has the port: end it, or give PORT="),
    (r"there is no checkpoint at", "give MODEL=, the folder with config.json and the weights"),
    (r"unrecognized arguments|invalid choice|expected one argument|invalid .* value",
     "the server does not take an option: look at EXTRA_ARGS and the overrides"),
    (r"No module named '?vllm'?(\s|$)", "this interpreter has no vLLM: give PYTHON=, or PYTHONPATH="),
    (r"(?m)^vllm overlay: (?!.*back ends: )",
     "the installed tree is not what is to be deployed: bash patch_ops.sh status, then apply"),
    (r"out of memory|OutOfMemory|MemoryError", "memory was used up: lower GPU_MEMORY_UTILIZATION= or "
     "MAX_NUM_BATCHED_TOKENS=, and see what else uses the device"),
    (r"error: .*back end", "a kernel library cannot be used: the line says which; VLLM_OVERLAY_KERNELS_<OP>=torch "
     "chooses another"),
)


class Milestones:
    """When each phase ended, from the lines of a log as they come."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}
        self.deployed: str | None = None
        self.account: dict[str, dict[str, float]] = {}
        self._rest = ""

    def feed(self, text: str, now: float) -> list[str]:
        """Text that was written to the log by `now`, seconds since the start. Returns the phases that ended."""
        *lines, self._rest = (self._rest + text).split("\n")
        before = set(self.at)
        for line in lines:
            self._line(line, now)
        return [name for name in NAMES if name in self.at and name not in before]

    def reached(self, name: str, now: float) -> None:
        """A phase that is seen from outside ended."""
        self.at.setdefault(name, now)

    @property
    def phase(self) -> str:
        """The phase that runs."""
        seen = [place for place, name in enumerate(NAMES) if name in self.at]
        return NAMES[min(seen[-1] + 1, len(NAMES) - 1)] if seen else NAMES[0]

    def table(self) -> list[dict[str, Any]]:
        """Per phase, in order: {"phase", "at_s", "took_s"}; None for one that was not seen."""
        found, last = [], 0.0
        for name in NAMES:
            at = self.at.get(name)
            found.append({"phase": name, "at_s": None if at is None else round(at, 3),
                          "took_s": None if at is None else round(at - last, 3)})
            last = last if at is None else at
        return found

    def _line(self, line: str, now: float) -> None:
        for place, (name, pattern) in enumerate(PHASES):
            if pattern is None or not re.search(pattern, line):
                continue
            # Ranks end a phase one after the other; what comes behind a later phase belongs to none.
            if not any(later in self.at for later in NAMES[place + 1:]):
                self.at[name] = now
        if line.startswith("vllm overlay: ") and self.deployed is None:
            self.deployed = line
        said = _ACCOUNT.search(line)
        if said:
            self.account[said[1]] = {"whole": float(said[2]), **{name: float(value) for name, value in
                                                                 _PART.findall(said[3])}}


def advice(text: str, code: int | None) -> str:
    """What to do about a start that failed; code: of the process, None if it was ended for taking too long."""
    told = [line for line in text.split("\n") if line.startswith(ERROR)]
    # What it says itself is the reason; before that, words of these may stand in harmless lines.
    for pattern, words in ADVICE:
        if re.search(pattern, told[-1] if told else "\n".join(text.split("\n")[-SEARCHED:])):
            return words
    if told:
        return f"change the override or the setting that its last words name ({told[-1]})"
    if code is None:
        return ("it hung: look at the last lines and the phase; where a card is sick a product of matrices never ends "
                "(try the device alone); give more time by --timeout")
    if code in (-9, 137):
        return "it was killed, as the system does when main memory is used up: look at the kernel's log"
    if code < 0:
        return f"it died by signal {-code}: in a library of the device or a kernel; the phase says where"
    return "look at the log's lines about errors, above the last ones, too"


def cleaned(text: str) -> str:
    """Without absolute paths (their last part stays), the machine's name and its addresses."""
    node = os.uname().nodename
    lines = (without_paths([line]) for line in text.split("\n"))
    found = _COMMON.sub("ADDRESS", "\n".join(lines))
    return re.sub(rf"\b{re.escape(node)}\b", "HOST", found) if len(node) > 3 else found
