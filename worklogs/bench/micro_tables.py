"""The ledger's tables of decode_microbench.py and startup_bench.py, as Markdown."""
from collections.abc import Callable
from typing import Any

from . import records
from .tables import grid, significant

Record = dict[str, Any]


def decode_microbench(found: list[Record]) -> str:
    """One row per record, context and batch; contexts that were left out, with the reason."""
    rows = []
    for record in found:
        name = records.name(record)
        for row in record["rows"]:
            head = [name, f"{row['context']:,}", str(row["batch"])]
            if "step_s" not in row:
                rows.append([*head, "failed: " + "; ".join(row["failed"]), *["-"] * 6])
                continue
            step = row["step_s"]
            notes = [f"{row['rounds']} rounds"] + (["uneven"] if row["uneven"] else []) + (
                ["client slow"] if not row["healthy"] else []) + row["failed"]
            cached = "not reported" if row["cached_tokens"] is None else f"{row['cached_tokens']:,.0f}"
            rows.append([*head, f"{cached} of {_shown(row['prompt_tokens'])}",
                         f"{step['p50'] * 1000:.4g} ({step['least'] * 1000:.4g} to {step['most'] * 1000:.4g})",
                         f"{step['p10'] * 1000:.4g} to {step['p90'] * 1000:.4g}",
                         *(_shown(row[figure]) for figure in ("stream_tps", "aggregate_tps", "tokens_per_step")),
                         "; ".join(notes)])
        rows += [[name, f"{one['context']:,}", "-", f"skipped: {one['why']}", *["-"] * 6] for one in record["skipped"]]
        if record["ended_early"]:
            rows.append([name, "-", "-", f"ended early: {record['ended_early']}", *["-"] * 6])
    return grid(["server", "context", "batch", "cached of prompt", "step, ms (range of rounds)", "P10 to P90, ms",
                 "tokens/s of one", "tokens/s of all", "tokens per step", "notes"], rows)


def startup(found: list[Record]) -> str:
    """One row per record, state of the page cache and phase; starts that failed, with the reason."""
    rows = []
    for record in found:
        name = f"{record['topic']}, ours {record['commit'][:7]}"
        for group in record["summary"]:
            for phase in group["phases"] if group["starts"] else ():
                rows.append([name, f"{group['page_cache']}, {group['starts']}", phase["phase"],
                             *(_range(phase[figure]) for figure in ("took_s", "at_s"))])
        rows += [[name, f"{start['page_cache']}, 1", f"failed before: {start['failure']['phase']}",
                  f"{start['failure']['why']}; {start['failure']['advice']}", "-"]
                 for start in record["starts"] if start["failure"] is not None]
    return grid(["start", "page cache, starts", "phase", "took, s (range)", "ended at, s (range)"], rows)


def engine_steps(found: list[Record]) -> str:
    """One row per record, measured thing, size and arm; how many times as long as the first arm."""
    rows = []
    for record in found:
        name, first = f"{record['model']}, ours {record['commit'][:7]}", next(iter(record["arms"]))
        for row in record["rows"]:
            ratio = "1"
            if "ratio" in row:
                ratio = "{median:.2f} ({least:.2f} to {most:.2f})".format(**row["ratio"]) + f" of {first}" \
                        + (": no change" if row["no_change"] else "")
            rows.append([name, f"{row['what']} {row['size']:,}", row["arm"],
                         f"{row['median_s'] * 1e3:.4g} ({row['least_s'] * 1e3:.4g} to {row['most_s'] * 1e3:.4g})",
                         ratio])
    return grid(["engine", "step", "back ends", f"ms, median of {len(found[0]['rounds'])} rounds (range)",
                 "time"], rows)


def _range(values: dict[str, float] | None) -> str:
    if values is None:
        return "not seen"
    return f"{values['median']:.1f}" + (f" ({values['least']:.1f} to {values['most']:.1f})" if values["count"] > 1
                                        else "")


def _shown(value: float | None) -> str:
    return "not reported" if value is None else significant(float(value))


KINDS: dict[str, Callable[[list[Record]], str]] = {"decode-microbench": decode_microbench, "startup": startup,
                                                   "engine-steps": engine_steps}
