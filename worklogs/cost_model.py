"""What a step of the engine costs, linear in a few features of it, fitted from measured points by least squares.

A step computes pieces of prompts and one token (or, with speculation, several) of running answers. Its time is the sum,
over FEATURES, of a cost times how much of it the step has. Costs are never negative. A cost that the points do not
determine, or that a points file fixes, is assumed, and the fit says so.

A points file is JSON:

    {"name": "...", "chunk": 2048, "experts": 256, "top_k": 8,
     "points": [{"what": "ttft", "prompt": 8192, "cached": 0, "seconds": 4.1, "source": "...", "mark": "M"},
                {"what": "step", "batch": 4, "context": 1024, "seconds": 0.055, "source": "...", "mark": "M"}],
     "assumed": {"decode_token": {"value": 0.001, "why": "..."}}}

ttft: from sending a request to its first token, alone on the server, its prompt computed in pieces of `chunk` tokens
(the point's own or the file's). step: the time between two tokens of each of `batch` answers, each at `context` tokens;
`tokens` of each answer are computed at once (1 without speculation). chunk: the server's max_num_batched_tokens. cut
(the point's own or the file's, false where it is not said): whether the server computes the end of a cold prompt in a
step of its own, as ours does for models with recurrent state.
experts, top_k: of a mixture-of-experts model, else 0. mark: how sure it is, as in the platform's facts (M measured,
L logged, S read in source, C claimed, I inferred); measured where it is not said.
"""
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from replay_trace import BLOCK

# Of a step, but the last two, which a request pays once, before its first step.
FEATURES = {
    "step": "every step",
    "experts": "the share of the experts that a step's tokens reach: reading their weights",
    "prefill_token": "every token of a prompt that is computed",
    "prefill_context": "every pair of such a token and one before it: attention",
    "decode_token": "every token of an answer that is computed",
    "decode_context": "every token before one of these",
    "prompt_token": "every token of a prompt, cached or not: reading, rendering, looking up",
    "request": "every request",
}
NAMES = tuple(FEATURES)
OF_REQUEST = ("prompt_token", "request")
# What is given up first where the points cannot tell two costs apart.
LEAST_NEEDED = ("experts", "prompt_token", "request", "decode_context", "prefill_context", "decode_token", "step",
                "prefill_token")
MARKS = "MLSCI"
# Policy.first of overlay/prefix_cache: no checkpoint, and so no cut, is below.
FIRST = 64


class PointsError(Exception):
    """A points file that cannot be used; one line."""


@dataclasses.dataclass(frozen=True)
class Step:
    """prefill: (first token, tokens) of each piece. decode: context of each answer. tokens: computed of each answer."""

    prefill: Sequence[tuple[int, int]] = ()
    decode: Sequence[float] = ()
    tokens: float = 1


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds per unit of each feature. experts, top_k: see above. assumed: feature -> why, of those not measured."""

    values: dict[str, float]
    experts: int = 0
    top_k: int = 0
    assumed: dict[str, str] = dataclasses.field(default_factory=dict)

    def step(self, step: Step) -> float:
        """Seconds of a step."""
        return self._sum(features(step, self.experts, self.top_k))

    def decoding(self, rows: int, context: float, steps: int, tokens: float = 1, advance: float = 1) -> float:
        """Seconds of `steps` steps of `rows` answers whose contexts add up to `context` before the first of them;
        every step each grows by `advance`."""
        grown = context + rows * advance * (steps - 1) / 2
        return steps * self.step(Step(decode=[grown / rows] * rows, tokens=tokens)) if rows and steps else 0.0

    def before(self, prompt: int) -> float:
        """Seconds between sending a request and its reaching the queue."""
        return self.values["request"] + self.values["prompt_token"] * prompt

    def _sum(self, found: dict[str, float]) -> float:
        return sum(self.values[name] * amount for name, amount in found.items())


@dataclasses.dataclass(frozen=True)
class Point:
    """A measured time and the features that it must be explained by. words: for the list of residuals."""

    features: dict[str, float]
    seconds: float
    words: str
    source: str
    mark: str


@dataclasses.dataclass(frozen=True)
class Fit:
    """costs; per point (words, source, mark, measured, fitted seconds); undetermined: costs that no point speaks of."""

    costs: Costs
    residuals: list[tuple[str, str, str, float, float]]
    undetermined: list[str]

    @property
    def errors(self) -> list[float]:
        """Relative, signed, per point."""
        return [fitted / measured - 1 for *_, measured, fitted in self.residuals]

    @property
    def rms(self) -> float:
        """Root of the mean square of the relative errors."""
        return float(np.sqrt(np.mean(np.square(self.errors))))


def features(step: Step, experts: int = 0, top_k: int = 0) -> dict[str, float]:
    """How much of each feature a step has."""
    prompt = sum(count for _, count in step.prefill)
    answers = len(step.decode) * step.tokens
    reached = 1 - (1 - top_k / experts) ** (prompt + answers) if experts else 0.0
    return {"step": 1.0, "experts": reached, "prefill_token": float(prompt),
            "prefill_context": sum(count * (start + count / 2) for start, count in step.prefill),
            "decode_token": float(answers), "decode_context": float(sum(step.decode)) * step.tokens}


def cut_of(prompt: int, cached: int) -> int:
    """Where our server cuts a prompt in two: a cold one before its last 1 to 16 tokens, so that whoever finds all that
    can be found computes the rest in the same way. 0 for nowhere."""
    last = (prompt - 1) // BLOCK * BLOCK
    return last if not cached and last >= FIRST else 0


def ttft_features(prompt: int, cached: int, chunk: int, experts: int = 0, top_k: int = 0,
                  cut: bool = False) -> dict[str, float]:
    """Of a request that is alone on the server, up to its first token. cut: as in a points file."""
    found = {"request": 1.0, "prompt_token": float(prompt)}
    ends = (cut_of(prompt, cached) if cut else 0, prompt)
    start = cached
    while start < prompt:
        count = min(chunk, next(end for end in ends if end > start) - start)
        for name, amount in features(Step([(start, count)]), experts, top_k).items():
            found[name] = found.get(name, 0.0) + amount
        start += count
    return found


def read(path: Path) -> tuple[dict[str, Any], list[Point]]:
    """A points file: its contents, and its points.

    Raises:
        PointsError: not there, does not parse, or a point without what it needs, by number.
    """
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PointsError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise PointsError(f"{path}: does not parse: {error}") from error
    if not isinstance(contents, dict) or not isinstance(contents.get("points"), list) or not contents["points"]:
        raise PointsError(f'{path}: holds no "points"')
    unknown = set(contents.get("assumed", {})) - set(NAMES)
    if unknown:
        raise PointsError(f"{path}: assumed {', '.join(sorted(unknown))}: costs are {', '.join(NAMES)}")
    found = []
    for number, point in enumerate(contents["points"], 1):
        try:
            found.append(_point(point, contents))
        except KeyError as error:
            raise PointsError(f"{path}: point {number} has no {error.args[0]!r}") from error
        except (TypeError, ValueError) as error:
            raise PointsError(f"{path}: point {number}: {error}") from error
    return contents, found


def _point(point: dict[str, Any], contents: dict[str, Any]) -> Point:
    experts, top_k = int(contents.get("experts", 0)), int(contents.get("top_k", 0))
    if not 0 <= top_k <= experts:
        raise ValueError(f"top_k {top_k} of {experts} experts")
    mark = point.get("mark", "M")
    if mark not in MARKS or len(mark) != 1:
        raise ValueError(f"mark {mark!r} is none of {', '.join(MARKS)}")
    if point["what"] == "ttft":
        chunk = point.get("chunk") or contents["chunk"]
        if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
            raise ValueError(f"a chunk of {chunk!r} tokens")
        prompt, cached = int(point["prompt"]), int(point.get("cached", 0))
        if not 0 <= cached < prompt:
            raise ValueError(f"{cached} of {prompt} tokens cached")
        found = ttft_features(prompt, cached, chunk, experts, top_k, bool(point.get("cut", contents.get("cut", False))))
        words = f"TTFT, {prompt:,} tokens, {cached:,} cached"
    elif point["what"] == "step":
        batch, tokens = int(point["batch"]), float(point.get("tokens", 1))
        if batch < 1:
            raise ValueError(f"a batch of {batch}")
        found = features(Step(decode=[float(point["context"])] * batch, tokens=tokens), experts, top_k)
        words = f"step, batch {batch} at {point['context']:,} tokens"
    else:
        raise ValueError(f"what {point['what']!r} is neither 'ttft' nor 'step'")
    seconds = float(point["seconds"])
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{seconds} seconds")
    return Point(found, seconds, words, str(point.get("source", "")), mark)


def fit(contents: dict[str, Any], points: Sequence[Point]) -> Fit:
    """Costs by least squares of the relative errors, so that a step of 20 ms counts as much as a prompt of 20 s."""
    fixed = {name: (float(given["value"]), str(given.get("why", "given")))
             for name, given in contents.get("assumed", {}).items()}
    values = {name: value for name, (value, _) in fixed.items()}
    matrix = np.array([[point.features.get(name, 0.0) / point.seconds for name in NAMES] for point in points])
    rest = np.ones(len(points)) - matrix @ np.array([values.get(name, 0.0) for name in NAMES])
    free = [name for name in NAMES if name not in fixed]
    undetermined: list[str] = []
    # Columns are scaled to length 1, so that "cannot be told apart" does not depend on units.
    scale = {name: float(np.linalg.norm(matrix[:, NAMES.index(name)])) for name in free}
    for name in LEAST_NEEDED:
        columns = matrix[:, [NAMES.index(one) for one in free]] / [scale[one] or 1.0 for one in free]
        if name in free and np.linalg.matrix_rank(columns, tol=1e-6) < len(free):
            without = np.delete(columns, free.index(name), axis=1)
            if np.linalg.matrix_rank(without, tol=1e-6) == np.linalg.matrix_rank(columns, tol=1e-6):
                free.remove(name)
                undetermined.append(name)
    columns = matrix[:, [NAMES.index(one) for one in free]] / [scale[one] or 1.0 for one in free]
    solution = nonnegative_least_squares(columns, rest)
    values.update({name: float(value) / scale[name] for name, value in zip(free, solution, strict=True)})
    values.update(dict.fromkeys(undetermined, 0.0))
    assumed = {name: why for name, (_, why) in fixed.items()}
    assumed.update(dict.fromkeys(undetermined, "0: the points do not determine it"))
    costs = Costs({name: values[name] for name in NAMES}, int(contents.get("experts", 0)),
                  int(contents.get("top_k", 0)), assumed)
    return Fit(costs, [(point.words, point.source, point.mark, point.seconds,
                        sum(values[name] * amount for name, amount in point.features.items())) for point in points],
               undetermined)


def nonnegative_least_squares(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """x >= 0 that makes |matrix x - wanted| least, by Lawson and Hanson's active sets.

    Args:
        matrix: float64 [points, costs] of full column rank. wanted: float64 [points].
    """
    count = matrix.shape[1]
    x = np.zeros(count)
    active = np.zeros(count, bool)      # which costs may be more than 0
    for _ in range(10 * count + 10):
        gradient = matrix.T @ (wanted - matrix @ x)
        gradient[active] = -np.inf
        if active.all() or gradient.max() <= 1e-12:
            break
        active[int(gradient.argmax())] = True
        while True:
            trial = np.zeros(count)
            trial[active] = np.linalg.lstsq(matrix[:, active], wanted, rcond=None)[0]
            low = active & (trial <= 0)
            if not low.any():
                break
            step = np.min(x[low] / np.maximum(x[low] - trial[low], 1e-300))
            x = x + step * (trial - x)
            x[active & (x <= 1e-15)] = 0.0
            active &= x > 0
        x = trial
    return x
