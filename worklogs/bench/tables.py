"""The ledger's tables of formal runs, comparisons, imported figures and simulations, as Markdown."""
from collections.abc import Callable
from typing import Any

from . import definitions, records, stats

Record = dict[str, Any]


def grid(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [head, ["---"] * len(head), *rows])


def significant(value: float | str) -> str:
    """Four digits, or all before the point; words as they are."""
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def formal_perf(found: list[Record]) -> str:
    """One row per record, in the predecessor's columns; intervals in brackets.

    Raises:
        RecordError: two records of one run, or one whose figures are not those of its samples.
    """
    _checked(found)

    def cell(record: Record, path: str, form: str) -> str:
        value = stats.figure(record["summary"], path)
        if value is None:
            return "not reported"
        interval = ((record.get("intervals") or {}).get("figures") or {}).get(path)
        return stats.shown(value, form) + (f" ({stats.between(interval, form)})" if interval else "")

    rows = []
    for record in found:
        bound = stats.figure(record["summary"], "hit_rate_theoretical")
        config = f"{records.name(record)}, {record['dataset']['name']}, " + (
            f"c{record['concurrency']}" if record["mode"] == "closed" else "open loop")
        config += f", at most {record['max_tokens']} tokens" if record["max_tokens"] else ""
        config += f"; ended early: {record['ended_early']}" if record.get("ended_early") else ""
        rows.append([config, cell(record, "success_rate", "{:.2%}"),
                     cell(record, "hit_rate", "{:.2%}") + (f" of {bound:.2%}" if bound is not None else ""),
                     cell(record, "ttft_s.p90", "{:.2f}"), cell(record, "output_tps.p10", "{:.2f}"),
                     cell(record, "aggregate.output_tps", "{:.2f}"),
                     cell(record, "aggregate.uncached_input_tps", "{:.2f}"),
                     cell(record, "aggregate.cached_tps", "{:.2f}"), cell(record, "weighted", "{:.2f}"),
                     records.health(record)])
    return grid(["config", "success", "cache hit of possible", "TTFT P90 s", "Output TPS P10", "Output TPS, aggregate",
                 "Input TPS", "Cache TPS", "weighted", "health"], rows)


def gates(found: list[Record]) -> str:
    """The gates of each record: value, verdict, and the gap.

    Raises:
        RecordError: two records of one run, or one whose figures are not those of its samples.
    """
    _checked(found)
    names = list(dict.fromkeys(gate["name"] for record in found for gate in record["summary"]["gates"]))
    rows = []
    for name in names:
        cells, wanted = [], ""
        for record in found:
            gate = next((gate for gate in record["summary"]["gates"] if gate["name"] == name), None)
            if gate is None or gate["value"] is None:
                cells.append("not reported")
                continue
            wanted = str(gate["wanted"])
            cells.append(f"{significant(gate['value'])}, {'met' if gate['met'] else 'not met'}")
        rows.append([name, wanted, *cells])
    return grid(["gate", "wanted", *map(records.name, found)], rows)


def _checked(found: list[Record]) -> None:
    for record in found:
        records.check(record, "a record")
    records.refuse_one_run_twice(found)


def comparison(found: list[Record]) -> str:
    """Per arm: ratios with intervals, noise, verdicts."""
    rows = []
    for record in found:
        for one in record["comparisons"]:
            rows.append([f"{one['other']} / {one['base']}", "**whole run**", "", "",
                         "; disturbed: ".join([one["verdict"], *one["disturbed"]])])
            for ratio in one["ratios"]:
                if ratio["verdict"] != "not reported":
                    interval, bounds = ratio["interval"], ratio["bounds"]
                    words = [stats.between(interval, "{:.3f}")] if interval else []
                    words += [] if bounds in (stats.LEVEL_WORDS, stats.NO_BOUNDS) else [bounds]
                    rows.append(["", ratio["name"], stats.shown(ratio["ratio"], "{:.3f}") + (
                        f" ({', '.join(words)})" if words else ""),
                        f"{ratio['noise']:.1%}{'' if ratio['measured'] else ' assumed'}", ratio["verdict"]])
    return grid(["arms", "figure", "ratio", "noise", "verdict"], rows)


def imported(found: list[Record]) -> str:
    """Figures of others as they gave them, and in the last columns what follows from them."""
    rows = []
    for record in found:
        for one in record["rows"]:
            implied = derived(one)
            rows.append([record["tag"], f"{one['config']} (`{one['source']}`)", f"{one['success']:.0%}",
                         *("-" if one.get(name) is None else f"{one[name]:.{digits}f}" for name, digits in (
                             ("cache_hit_percent", 2), ("ttft_p90_s", 2), ("output_tps_p10", 2), ("input_tps", 2),
                             ("cache_tps", 2), ("weighted", 2), ("aggregate_output_tps", 2))),
                         *("-" if implied[name] is None else f"{implied[name]:.2f}"
                           for name in ("cache_hit_percent", "aggregate_output_tps"))])
    return grid(["tag", "config", "success", "cache hit, %", "TTFT P90 s", "Output TPS P10", "Input TPS", "Cache TPS",
                 "weighted", "aggregate Output TPS", "derived: cache hit, %", "derived: aggregate Output TPS"], rows)


def derived(row: Record) -> dict[str, float | None]:
    """What an imported row's columns imply: cached / (uncached + cached), and the Output TPS that the weighted figure
    needs beside them. None where a column is missing."""
    uncached, cached, weighted = (row.get(name) for name in ("input_tps", "cache_tps", "weighted"))
    if uncached is None or cached is None:
        return {"cache_hit_percent": None, "aggregate_output_tps": None}
    output = None
    if weighted is not None:
        rest = definitions.weighted(0.0, uncached, cached)
        output = (weighted - rest) / definitions.weighted(1.0, 0.0, 0.0)
    return {"cache_hit_percent": 100 * cached / (uncached + cached), "aggregate_output_tps": output}


def replay_sim(found: list[Record]) -> str:
    """Under each alternative the best setting of each concurrency, and how far the others are from it; then what was
    assumed and how well the costs fit."""
    rows, notes = [], []
    for record in found:
        groups: dict[tuple[str, int], list[Record]] = {}
        for one in record["outcomes"]:
            groups.setdefault((one["alternative"], one["concurrency"]), []).append(one)
        for group in groups.values():
            one, least = group[0], min(each["figures"]["weighted"] or 0.0 for each in group)
            figures, missed = one["figures"], [name if met is False else f"{name} (not known)"
                                              for name, met in one["gates"] if met is not True]
            guess = f", {one['speculate']} guessed at {one['acceptance']:g}" if one["speculate"] else ""
            rows.append([one["alternative"], f"{one['concurrency']} at a time, chunk {one['chunk']:,}, "
                         f"{one['policy']}{guess}", *(_or_dash(figures[name], form) for name, form in (
                             ("weighted", "{:,.0f}"), ("wall_s", "{:,.0f}"), ("ttft_s.p90", "{:.1f}"),
                             ("output_tps.p10", "{:.1f}"))), f"{one['sent']} of {one['of']}",
                         "; ".join(missed) or "none", f"{len(group) - 1}, down to {least:,.0f}"])
        fit = record["fit"]
        notes += [[record["name"], "points", f"{fit['points']}, relative error (root mean square) {fit['rms']:.1%}"],
                  *([record["name"], f"point ({one['mark']})",
                     f"{one['point']}: {one['measured_s']:g} s; {one['source']}"] for one in fit["residuals"][:12]),
                  *([record["name"], f"assumed: {name} = {fit['costs'][name]:.3g} s", why]
                    for name, why in fit["assumed"].items()),
                  *([record["name"], "assumed by the model", words] for words in record["model_assumes"]),
                  *([record["name"], f"check ({one['mark']})", f"{one['name']}: {one['figure']} predicted "
                     f"{significant(one['predicted'])}, reported {one['reported']:g} ({one['off']:+.1%})"]
                    for one in record["checks"])]
    return grid(["costs", "setting", "weighted", "wall s", "TTFT P90 s", "Output TPS P10", "sent", "gates missed",
                 "other settings, weighted"],
                rows) + "\n" + grid(["costs", "what", "words"], notes)


def replay_sim_check(found: list[Record]) -> str:
    """Predicted beside measured figures; medians and their ranges where there are several runs."""
    def cell(one: Record, arm: str) -> str:
        real, value = one["measured"], one[arm]
        if value is None:
            return "-"
        words = [f"{value / real - 1:+.1%}"] if real else []
        if arm in one.get("ranges", {}):
            words.append("{:.4g} to {:.4g}".format(*one["ranges"][arm]))
        words += [] if one.get("overlap", {}).get(arm) is None else ["overlap" if one["overlap"][arm] else "apart"]
        return f"{value:.4g}" + (f" ({', '.join(words)})" if words else "")

    rows = []
    for record in found:
        # Records of before repeats were asked for name one run.
        names = record["records"] if "records" in record else [record["record"]]
        run = names[0] if len(names) == 1 else f"{len(names)} repeats"
        if "runs" in record:
            rows.append([", ".join(names), "**how**", "median (range)" if len(names) > 1 else "one run", *[
                f"median of {record['runs']} simulated runs of each ({record['level']:.0%} of them)"] * 2,
                f"steps vary by {record['jitter']:.1%} (assumed)"])
        for one in record["figures"]:
            real = _or_dash(one["measured"], "{:.4g}")
            if len(names) > 1 and one["measured_range"] is not None:
                real += " ({:.4g} to {:.4g})".format(*one["measured_range"])
            rows.append([run, one["figure"], real, *(cell(one, name) for name in (
                "cache modelled", "hits as measured")),
                "not judged" if one["figure"] in record.get("not_judged", []) else "shown only" if not one["judged"]
                else "off" if one["figure"] in record["off"] else "within"])
    return grid(["run", "figure", "measured", "predicted", "predicted, hits as measured", "verdict"], rows)


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def cross_check(found: list[Record]) -> str:
    """One row per tool and record: median and worst deviation from what the stub flushed, in ms."""
    def off(one: Record, name: str) -> str:
        both = one["off_ms"][name]
        return "not kept" if both is None else f"{both['median']:+.2f} ({both['worst']:+.2f})"

    rows = []
    for record in found:
        for tool, one in record["tools"].items():
            version = record["commit"][:7] if tool == "ours" else one["version"]
            rows.append([f"{tool} {version}", one["end_of_an_answer"], "exact" if one["tokens_exact"] else "not exact",
                         *(off(one, name) for name in ("ttft_ms", "whole_ms", "per_token_ms", "steps_ms")),
                         f"{one['within']} of {one['requests']}, {one['runs']} runs",
                         f"{one['answers_proved']} of {one['answers']}", "agrees" if one["agrees"] else "disagrees"])
    return grid(["tool", "an answer ends with", "tokens", "TTFT off by, ms (worst)", "whole time", "time per token",
                 "each step", "requests within", "answers", "verdict"], rows)


KINDS: dict[str, Callable[[list[Record]], str]] = {
    "formal-perf": formal_perf, "gates": gates, "comparison": comparison, "imported": imported,
    "replay-sim": replay_sim, "replay-sim-check": replay_sim_check, "cross-check": cross_check}
