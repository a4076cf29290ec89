"""The seven lines that ours is held to beside its peers, from the samples of bench_peers.py.

A figure of a server is the median of a round's samples, and over rounds the median of these. Samples that others
disturbed are left out where a server has some of the same figure that they did not; else all count, and the row says
it. The ratio of a row is that of the medians, its range that of the rounds in which both were measured. The best peer
is the one with the best median among those of the same weight precision.
"""
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.floors import Floors  # noqa: E402
from bench.peer_tables import MET  # noqa: E402
from bench.records import SERVERS  # noqa: E402
from peers import sittings  # noqa: E402
from peers.speed import NEW, STREAM_PROMPT, Sizes  # noqa: E402

Unit = dict[str, Any]
Row = dict[str, Any]
Values = dict[int, float]
ISSUE = Sizes()
PREFILL, DECODE, WARM_OF_COLD, WARM_OF_FLOOR, MEMORY, START, FRONT, INT8 = 2.0, 1.35, 0.05, 1.3, 1.25, 0.5, 0.5, 1.2
WALL = {("vllm", 64): 1.8, ("vllm", 256): 1.4, ("llama", 64): 4.0}
GROWTH = (2048, 32768)


@dataclasses.dataclass(frozen=True)
class Machine:
    """first, second: what the slices' tokens cost at least. weights: bytes of the first slice's. reserved: bytes of KV
    and states that ours has put aside, None where its log did not say. rate: bytes per second that were read at most,
    None where that was not measured; that of a sitting itself goes before. left_out: servers without results -> why."""

    first: Floors
    second: Floors
    weights: int
    reserved: float | None
    rate: float | None
    left_out: dict[str, str]


class Measured:
    """The samples of all units."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._samples = [{"round": unit["round"], "sitting": unit["sitting"], "kind": unit["kind"], **sample}
                         for unit in units for sample in unit.get("samples", ())]
        self._rates = [(unit["sitting"], unit["kind"], rate) for unit in units
                       for rate in unit.get("read_bytes_per_s", ())]
        self._failed = [unit for unit in units if "failed" in unit]

    def of(self, kind: str, sitting: str, what: str, size: int) -> list[dict[str, Any]]:
        """Samples that count, or all where none does; without those that failed."""
        found = [sample for sample in self._asked(kind, sitting, what, size) if "failed" not in sample]
        return [sample for sample in found if sample["counted"]] or found

    def values(self, kind: str, sitting: str, what: str, size: int, field: str) -> Values:
        """Round -> median."""
        rounds: dict[int, list[float]] = {}
        for sample in self.of(kind, sitting, what, size):
            if sample.get(field) is not None:
                rounds.setdefault(sample["round"], []).append(sample[field])
        return {number: statistics.median(values) for number, values in rounds.items()}

    def disturbed(self, kind: str, sitting: str, what: str, size: int) -> bool:
        """Whether all that there is was disturbed."""
        found = self.of(kind, sitting, what, size)
        return bool(found) and not found[0]["counted"]

    def rate(self, kind: str, sitting: str) -> float | None:
        """Bytes per second at which memory was read around a server's sittings, the median."""
        found = [rate for *place, rate in self._rates if place == [sitting, kind]]
        return statistics.median(found) if found else None

    def why(self, kind: str, sitting: str, what: str, size: int) -> str:
        """What kept a figure from being measured; empty where nobody tried."""
        words = [sample["failed"] for sample in self._asked(kind, sitting, what, size) if "failed" in sample]
        words += [unit["failed"] for unit in self._failed if unit["kind"] == kind and unit["sitting"] == sitting]
        return words[0] if words else ""

    def all(self) -> list[tuple[str, str, int, str]]:
        """(sitting, what, size, kind) of all samples, each once, in order."""
        return list(dict.fromkeys(map(_key, self._samples)))

    def sizes(self, sitting: str, what: str) -> set[int]:
        """Of the samples."""
        return {size for one, thing, size, _ in self.all() if (one, thing) == (sitting, what)}

    def _asked(self, kind: str, sitting: str, what: str, size: int) -> list[dict[str, Any]]:
        asked = (sitting, what, size, kind)
        return [sample for sample in self._samples if _key(sample) == asked]


class Lines:
    """Makes the rows of all lines."""

    def __init__(self, units: Sequence[Unit], machine: Machine) -> None:
        self.measured, self.machine = Measured(units), machine

    def rows(self) -> list[Row]:
        """All, in order of the lines."""
        return [*self._prefill(), *self._decode(), *self._warm(), *self._walls(), *self._memory_and_start(),
                *self._front_end(), *self._int8()]

    def _prefill(self) -> list[Row]:
        rows = [self._against(1, f"prefill of {size:,} tokens, tok/s", "long", "prefill", size, "seconds", PREFILL,
                              rate=size) for size in self._sizes("long", "prefill", ISSUE.prefill)]
        short, long = (self.measured.values("ours", "long", "prefill", size, "seconds") for size in GROWTH)
        growth = {number: (long[number] / GROWTH[1]) / (short[number] / GROWTH[0]) for number in short
                  if number in long}
        limit = self.machine.first.growth(*GROWTH)
        return [*rows, self._alone(1, "time per token, 32,768 tokens / 2,048 tokens", growth, limit,
                                   "the growth of its operations", self._disturbed("long", "prefill", GROWTH))]

    def _decode(self) -> list[Row]:
        rows = []
        for sitting, words, sizes in (("streams", "", ISSUE.streams), ("second", ", second slice", ISSUE.streams)):
            floors = self.machine.second if sitting == "second" else self.machine.first
            for size in self._sizes(sitting, "decode", sizes):
                row = self._against(2, f"decode, {size} at once{words}, tok/s", sitting, "decode", size, "tps", DECODE)
                rows.append(self._with_floor(row, sitting, size, floors))
        return rows

    def _with_floor(self, row: Row, sitting: str, size: int, floors: Floors) -> Row:
        """Says how far ours is from reading each byte of a step once."""
        found = self.measured.of("ours", sitting, "decode", size)
        rate = self.measured.rate("ours", sitting) or self.machine.rate
        if row["ours"] is None or rate is None:
            return row
        context = STREAM_PROMPT + found[0]["tokens"] // 2
        least = floors.step_bytes(size, context) / rate
        share = least / (size / row["ours"])
        row["notes"].append(f"{share:.0%} of what reading the step's bytes once at {rate / 1e9:.1f} GB/s allows")
        return row

    def _warm(self) -> list[Row]:
        rows = []
        for size in self._sizes("long", "warm", ISSUE.warm):
            rows.append(self._against(3, f"warm TTFT of {size:,} + {NEW} tokens, s", "long", "warm", size, "seconds",
                                      1.0, lower=True))
            rows.append(self._warm_limit(size))
        return rows

    def _warm_limit(self, size: int) -> Row:
        """Of its own cold prompt and of the bytes of a step over what was computed."""
        what = f"warm TTFT of {size:,} + {NEW} tokens, s, of its own limit"
        warm = self.measured.values("ours", "long", "warm", size, "seconds")
        cold = self.measured.values("ours", "long", "cold", size, "seconds")
        found = self.measured.of("ours", "long", "warm", size)
        known = [sample["prompt"] - sample["cached"] for sample in found if sample["cached"] is not None]
        rate = self.measured.rate("ours", "long") or self.machine.rate
        if not warm or not cold or not known or rate is None:
            why = self.measured.why("ours", "long", "warm", size)
            return _row(3, what, wanted="<= 1", extra=size not in ISSUE.warm, notes=[why] if why else [])
        computed = statistics.median(known)
        least = self.machine.first.step_bytes(round(computed), size + NEW, sequences=1) / rate
        limit = max(WARM_OF_COLD * statistics.median(cold.values()), WARM_OF_FLOOR * least)
        row = self._alone(3, what, warm, limit, f"{WARM_OF_COLD:.0%} of cold, or {WARM_OF_FLOOR:g} times the byte "
                          "floor", self._disturbed("long", "warm", (size, )))
        row["notes"].append(f"cached {size + NEW - computed:g} of {size + NEW}; cold {_median(cold):.3f} s, byte floor "
                            f"{least:.3f} s")
        return {**row, "extra": size not in ISSUE.warm}

    def _walls(self) -> list[Row]:
        rows = []
        for (kind, tokens), factor in WALL.items():
            for _, concurrency in (one for one in sittings.DATASETS if one[0] == tokens):
                sitting = sittings.dataset_name(tokens, concurrency)
                row = self._against(4, f"wall time of the dataset, answers of {tokens}, {concurrency} at a time, s",
                                    sitting, "wall", 0, "seconds", factor, lower=True, inverse=True, peers=(kind, ))
                weighted = {one: _median(self.measured.values(one, sitting, "wall", 0, "weighted"))
                            for one in ("ours", kind)}
                if None not in weighted.values():
                    row["notes"].append(f"weighted: {weighted['ours']:.4g} beside {weighted[kind]:.4g}, not judged")
                rows.append(row)
        return rows

    def _memory_and_start(self) -> list[Row]:
        peak = self.measured.values("ours", "long", "memory", 0, "peak")
        what = "peak memory of its processes, GB, of weights + KV + states"
        if self.machine.reserved is None:
            row = _row(5, what, wanted=f"<= {MEMORY:g}", notes=["its log names no plan of the memory"] if peak else [])
        else:
            row = self._alone(5, what, {number: value / 1e9 for number, value in peak.items()},
                              (self.machine.weights + self.machine.reserved) / 1e9, "weights + KV + states", False,
                              MEMORY)
            held = _median(self.measured.values("ours", "long", "memory", 0, "peak_rss"))
            if held is not None:
                row["notes"].append(f"weights {self.machine.weights / 1e9:.2f} GB; {held / 1e9:.2f} GB where libraries "
                                    "that processes share count for each")
        return [row, self._against(5, "start to the first token, s", "long", "start", 0, "seconds", START, lower=True,
                                   peers=("vllm", ))]

    def _front_end(self) -> list[Row]:
        return [self._against(6, f"front end, CPU {words}, ms", "streams", what, size, "cpu_s", FRONT, lower=True,
                              peers=("vllm", ), scale=1e3)
                for what, words, asked in (
                    ("front stream", "per streamed token, {} at once", ISSUE.front_streams),
                    ("front prompt", "per request of {:,} tokens", ISSUE.front_prompt))
                for size in self._sizes("streams", what, (asked, ))
                for words in (words.format(size), )]

    def _int8(self) -> list[Row]:
        return [self._against(7, f"int8 decode, {size} at once, tok/s", "int8", "decode", size, "tps", INT8,
                              peers=("llama", )) for size in self._sizes("int8", "decode", (1, ))]

    def _sizes(self, sitting: str, what: str, asked: Sequence[int]) -> list[int]:
        return sorted({*asked, *self.measured.sizes(sitting, what)})

    def _disturbed(self, sitting: str, what: str, sizes: Sequence[int], kinds: Sequence[str] = ("ours", )) -> bool:
        return any(self.measured.disturbed(kind, sitting, what, size) for kind in kinds for size in sizes)

    def _alone(self, line: int, what: str, values: Values, limit: float, of: str, disturbed: bool,
               factor: float = 1.0) -> Row:
        """A figure of ours against a limit of its own."""
        row = _row(line, what, wanted=f"<= {factor:g} x {limit:.4g} ({of})")
        if values:
            ratios = [value / limit for value in values.values()]
            ratio = _median(values) / limit
            row |= {"ours": _median(values), "other": of, "other_value": limit, "ratio": ratio,
                    "range": [min(ratios), max(ratios)], "met": ratio <= factor}
        if disturbed:
            row["notes"].append("disturbed")
        return row

    def _against(self, line: int, what: str, sitting: str, thing: str, size: int, field: str, factor: float, *,
                 lower: bool = False, inverse: bool = False, peers: Sequence[str] = sittings.ALL[1:],
                 rate: float | None = None, scale: float = 1.0) -> Row:
        """A figure of ours against the best peer's.

        lower: less is better, and the ratio at most `factor`; inverse: the peer's to ours, at least it. rate: the
        figure is that many tokens / the field. scale: of the figure as it is shown.
        """
        def values(kind: str) -> Values:
            found = self.measured.values(kind, sitting, thing, size, field)
            return {number: scale * (rate / value if rate else value) for number, value in found.items()}

        at_most = lower and not inverse
        row = _row(line, what, wanted=f"{'<=' if at_most else '>='} {factor:g}", extra=size not in _asked(thing))
        ours, others = values("ours"), {kind: found for kind in peers if (found := values(kind))}
        if ours:
            row["ours"] = _median(ours)
        missing = [kind for kind in ("ours", *peers) if kind not in others and not (kind == "ours" and ours)
                   and not self._cannot(kind, sitting, thing, size)]
        why = {kind: self.machine.left_out.get(kind) or self.measured.why(kind, sitting, thing, size)
               for kind in missing}
        if ours or others or any(why.values()):
            row["notes"] += [f"without {SERVERS[kind]}: {words or 'not run'}" for kind, words in why.items()]
        if not ours or not others:
            return row
        best = (min if lower else max)(others, key=lambda kind: _median(others[kind]) or 0.0)
        row |= {"other": SERVERS[best], "other_value": _median(others[best])}
        pairs = [(one, ours[number]) if inverse else (ours[number], one)
                 for number, one in others[best].items() if number in ours]
        whole = (row["other_value"], row["ours"]) if inverse else (row["ours"], row["other_value"])
        if not all(below for _, below in (*pairs, whole)):
            row["notes"].append("0 is less than what can be measured")
            return row
        ratios, ratio = [above / below for above, below in pairs], whole[0] / whole[1]
        row |= {"ratio": ratio, "range": [min(ratios), max(ratios)] if ratios else None,
                "met": ratio <= factor if at_most else ratio >= factor}
        if self._disturbed(sitting, thing, (size, ), ("ours", best)):
            row["notes"].append("disturbed")
        return row

    def _cannot(self, kind: str, sitting: str, thing: str, size: int) -> bool:
        """Whether a server has no way to do it, so that it is missed by nobody."""
        part = {"streams": "decode", "second": "second", "int8": "int8"}.get(sitting, thing)
        return part in sittings.LACKS[kind] or (thing == "decode" and size > sittings.streams_of(kind))


def lines(rows: Sequence[Row]) -> dict[int, str]:
    """Line -> met, not met or not measured: met only where each of its rows is."""
    found = {}
    for line in range(1, 8):
        verdicts = [row["met"] for row in rows if row["line"] == line and not row["extra"]]
        found[line] = MET[False if False in verdicts else None if None in verdicts or not verdicts else True]
    return found


def figures(units: Sequence[Unit]) -> list[Row]:
    """Every measured figure of every server: median of rounds, their range, how many samples counted of how many."""
    fields = {"decode": "tps", "front stream": "cpu_s", "front prompt": "cpu_s", "memory": "peak"}
    measured, rows = Measured(units), []
    for sitting, what, size, kind in measured.all():
        values = measured.values(kind, sitting, what, size, fields.get(what, "seconds"))
        found = measured.of(kind, sitting, what, size)
        row = {"sitting": sitting, "what": what, "size": size, "server": kind, "samples": len(found),
               "disturbed": measured.disturbed(kind, sitting, what, size)}
        if values:
            row |= {"median": _median(values), "least": min(values.values()), "most": max(values.values()),
                    "rounds": len(values)}
        else:
            row["failed"] = measured.why(kind, sitting, what, size)
        cached = [sample["cached"] for sample in found if sample.get("cached") is not None]
        if what == "warm" and cached:
            row["cached"] = statistics.median(cached)
        rows.append(row)
    return rows


def _key(sample: dict[str, Any]) -> tuple[str, str, int, str]:
    return sample["sitting"], sample["what"], sample["size"], sample["kind"]


def _asked(thing: str) -> Sequence[int]:
    """The sizes of the issue."""
    return {"prefill": ISSUE.prefill, "decode": ISSUE.streams, "warm": ISSUE.warm, "front stream": (
        ISSUE.front_streams, ), "front prompt": (ISSUE.front_prompt, )}.get(thing, (0, ))


def _row(line: int, what: str, *, wanted: str, extra: bool = False, notes: list[str] | None = None) -> Row:
    return {"line": line, "what": what, "ours": None, "other": None, "other_value": None, "ratio": None, "range": None,
            "wanted": wanted, "met": None, "extra": extra, "notes": notes or []}


def _median(values: Values) -> float | None:
    return statistics.median(values.values()) if values else None
