"""One HTML page of formal runs: figures with intervals, gates, plots. It needs no network, no script and no other file.

    python worklogs/report.py RECORD.json [MORE.json ...] [-o report.html]
    python worklogs/report.py RECORD.json --markdown        the ledger's tables instead

Each record gets a section; two or more get a table side by side, and, if they measured the same, the comparison of
compare.py with the first. Plots: TTFT by length of the prompt and cached share, decoding speed by context, output TPS
of whole requests by length, the run's timeline, cache hits by turn.
"""
import argparse
import html
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import compare  # noqa: E402
from bench import definitions, plots, records, stats, tables  # noqa: E402
from bench.plots import Bar, Point, Stretch, axis  # noqa: E402

GATES = {path: bound for _, path, _, bound in definitions.GATES}
TABLE = (("success rate", "success_rate", "{:.2%}"), ("cache hit rate", "hit_rate", "{:.2%}"),
         ("TTFT P50, s", "ttft_s.p50", "{:.3f}"), ("TTFT P90, s", "ttft_s.p90", "{:.3f}"),
         ("TTFT P90, failures counted, s", "failure_adjusted.ttft_s.p90", "{:.3f}"),
         ("output TPS of a request, P10", "output_tps.p10", "{:.2f}"),
         ("output TPS of a request, P50", "output_tps.p50", "{:.2f}"),
         ("output TPS, P10, failures counted", "failure_adjusted.output_tps.p10", "{:.2f}"),
         ("decode TPS, P50", "decode_tps.p50", "{:.2f}"), ("input TPS of a request, P50", "input_tps.p50", "{:.1f}"),
         ("output TPS, over the wall", "aggregate.output_tps", "{:.2f}"),
         ("uncached input TPS, over the wall", "aggregate.uncached_input_tps", "{:.2f}"),
         ("cached TPS, over the wall", "aggregate.cached_tps", "{:.2f}"),
         ("all tokens per second, over the wall", "aggregate.total_tps", "{:.2f}"),
         ("weighted score", "weighted", "{:.2f}"))
# How a gate's verdict is painted.
STATES = {True: "met", False: "missed", None: "soft"}
STYLE = """
:root { color-scheme: light dark; --paper:#ffffff; --ink:#1c2024; --soft:#7b858e; --line:#e3e7ea; --bad:#c2255c;
 --good:#1b7f4b; --panel:#f6f8f9; LIGHT }
@media (prefers-color-scheme: dark) { :root { --paper:#14181b; --ink:#e6e9eb; --soft:#8b959d; --line:#2b3237;
 --bad:#ff7096; --good:#52cf8f; --panel:#1c2226; DARK } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px 16px 64px; max-width: 1640px; background: var(--paper); color: var(--ink);
 font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; }
h2 { font-size: 19px; margin: 40px 0 8px; border-top: 1px solid var(--line); padding-top: 20px; }
h3 { font-size: 15px; margin: 0 0 4px; } p { margin: 4px 0 10px; } .soft { color: var(--soft); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); gap: 16px; }
figure { margin: 0; padding: 14px; background: var(--panel); border-radius: 8px; }
.legend { font-size: 13px; margin: 0 0 6px; } .legend span { margin-right: 10px; white-space: nowrap; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 8px 0; }
th, td { text-align: left; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; } td.n, th.n { text-align: right; } .met { color: var(--good); } .missed { color: var(--bad); }
code { font-size: 13px; overflow-wrap: anywhere; } details { margin: 8px 0; }
"""


def escape(value: Any) -> str:
    """For HTML."""
    return html.escape(str(value))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 1) -> str:
    """An HTML table; cells are HTML already; those from column `numbers` on are set to the right."""
    def cells(kind: str, row: Sequence[str]) -> str:
        return "<tr>" + "".join(f'<{kind}{" class=n" if place >= numbers else ""}>{cell}</{kind}>'
                                for place, cell in enumerate(row)) + "</tr>"
    return (f'<div class="wide"><table><thead>{cells("th", head)}</thead><tbody>'
            + "".join(cells("td", row) for row in rows) + "</tbody></table></div>")


def value(record: records.Record, path: str, form: str) -> str:
    """A figure with its interval; "not reported" where there is none."""
    number = stats.figure(record["summary"], path)
    if number is None:
        return '<span class="soft">not reported</span>'
    interval = ((record.get("intervals") or {}).get("figures") or {}).get(path)
    text = stats.shown(number, form)
    if interval:
        text += f' <span class="soft">{stats.between(interval, form)}</span>'
    return text


def gates(record: records.Record) -> str:
    """The gate table."""
    rows = []
    for gate in record["summary"].get("gates", []):
        shown = "not reported" if gate["value"] is None else tables.significant(gate["value"])
        verdict = "not reported" if gate["met"] is None else "met" if gate["met"] else "not met"
        rows.append([escape(gate["name"]), escape(gate["wanted"]), escape(shown),
                     f'<span class="{STATES[gate["met"]]}">{verdict}</span>'])
    return table(["gate", "wanted", "value", "verdict"], rows, numbers=4)


def said(sample: dict[str, Any]) -> str:
    """A request in words, shown under the pointer."""
    words = [f"request {sample['index']}, conversation {sample['conversation']}, turn {sample['turn']}"]
    for name, key in (("prompt", "prompt_tokens"), ("cached", "cached_tokens"), ("answer", "completion_tokens")):
        words.append(f"{name} {'not reported' if sample[key] is None else format(sample[key], ',')}")
    if sample["first_s"] is not None:
        words.append(f"TTFT {sample['first_s'] - sample['sent_s']:.3f} s")
    if sample["last_s"] is not None:
        words.append(f"whole {sample['last_s'] - sample['sent_s']:.3f} s")
    if sample["class"] != "ok":
        words.append(f"{sample['class']}: {sample.get('error') or ''}")
    return "; ".join(words)


def share(sample: dict[str, Any]) -> float | None:
    """Cached share of a prompt; None if not reported."""
    if not sample["prompt_tokens"] or sample["cached_tokens"] is None:
        return None
    return sample["cached_tokens"] / sample["prompt_tokens"]


def succeeded(record: records.Record) -> list[dict[str, Any]]:
    """Samples that plots of times show."""
    return [sample for sample in record["samples"]
            if sample["class"] == "ok" and sample["first_s"] is not None and sample["last_s"] is not None]


SHARES = [("c0", "cached below 20 %"), ("c1", "to 40 %"), ("c2", "to 60 %"), ("c3", "to 80 %"), ("c4", "more"),
          ("none", "not reported")]


def ttft_plot(record: records.Record) -> str:
    """TTFT by length and cached share."""
    found = [sample for sample in succeeded(record) if sample["prompt_tokens"]]
    points = [Point(sample["prompt_tokens"], sample["first_s"] - sample["sent_s"], plots.by_share(share(sample)),
                    said(sample)) for sample in found]
    plot = plots.scatter("TTFT in seconds by prompt tokens", points,
                         axis("prompt tokens", [point.x for point in points], True),
                         axis("TTFT, s", [point.y for point in points], True), GATES["ttft_s.p90"])
    plot = plots.legend(_used(points, SHARES)) + plot
    return figure_of("TTFT by length of the prompt and cached share", plot, points)


def decode_plot(record: records.Record) -> str:
    """Decoding speed by context."""
    points = [Point(sample["prompt_tokens"] + sample["completion_tokens"] / 2, tps, "s0", said(sample))
              for sample in succeeded(record)
              if sample["prompt_tokens"] and (tps := definitions.decode_tps(sample))]
    return figure_of("Decoding speed by context", plots.scatter(
        "decode tokens per second by context", points, axis("context at half of the answer, tokens",
                                                            [point.x for point in points], True),
        axis("decode tokens/s", [point.y for point in points], least=0.0)), points)


def output_plot(record: records.Record) -> str:
    """Output TPS of whole requests, which the gate judges."""
    points = [Point(sample["prompt_tokens"], tps, plots.by_share(share(sample)), said(sample))
              for sample in succeeded(record)
              if sample["prompt_tokens"] and (tps := definitions.output_tps(sample))]
    return figure_of("Output TPS of whole requests by length of the prompt", plots.legend(_used(points, SHARES))
                     + plots.scatter("output tokens per second of whole requests by prompt tokens", points,
                                     axis("prompt tokens", [point.x for point in points], True),
                                     axis("output tokens/s", [point.y for point in points], least=0.0),
                                     GATES["output_tps.p10"]), points)


def timeline_plot(record: records.Record) -> str:
    """Every request: waiting and prompt, then its answer; one row per request at a time."""
    found = [sample for sample in record["samples"] if sample["sent_s"] is not None]
    spans = [(sample["sent_s"], _end(sample)) for sample in found]
    rows = plots.rows_of(spans)
    pieces = []
    for sample, (start, end), row in zip(found, spans, rows, strict=True):
        if sample["class"] != "ok":
            pieces.append(Stretch(row, start, end, "bad", said(sample)))
            continue
        first = sample["first_s"] if sample["first_s"] is not None else end
        pieces += [Stretch(row, start, first, "s1", said(sample)), Stretch(row, first, end, "s0", said(sample))]
    entries = [("s1", "until the first token"), ("s0", "answer"), ("bad", "failed")]
    return figure_of("Timeline of the run", plots.legend(_used(pieces, entries)) + plots.timeline(
        "requests over time", pieces, max(rows, default=0) + 1,
        axis("seconds since the run's start", [record["wall_s"], *(end for _, end in spans)], least=0.0)), pieces)


def hits_plot(record: records.Record) -> str:
    """Share of the tokens of each turn that came from the cache, and what could have."""
    turns: dict[int, list[dict[str, Any]]] = {}
    for sample in record["samples"]:
        if sample["class"] == "ok" and share(sample) is not None:
            turns.setdefault(sample["turn"], []).append(sample)
    found = []
    for turn, samples in sorted(turns.items()):
        tokens = sum(sample["prompt_tokens"] for sample in samples)
        known = all(sample["theoretical_reuse"] is not None for sample in samples)
        bound = sum(sample["theoretical_reuse"] for sample in samples) / tokens if known else None
        hit = sum(sample["cached_tokens"] for sample in samples) / tokens
        found.append(Bar(str(turn), hit, bound, "s2", f"turn {turn}, {len(samples)} requests: {hit:.1%} cached"
                         + (f", {bound:.1%} possible" if bound is not None else "")))
    return figure_of("Cache hits by turn (line: what an unlimited cache would find)", plots.bars(
        "share of prompt tokens from the cache by turn", found, axis("share of prompt tokens", [1.0]), "turn"), found)


def figure_of(title: str, plot: str, marks: Sequence[Any]) -> str:
    """A plot under its title, or a sentence where it has nothing to show."""
    inner = plot if marks else '<p class="soft">nothing to show: no request that succeeded reported what this needs</p>'
    return f"<figure><h3>{escape(title)}</h3>{inner}</figure>"


def _used(marks: Sequence[Any], entries: list[tuple[str, str]]) -> list[tuple[str, str]]:
    there = {mark.style for mark in marks}
    return [entry for entry in entries if entry[0] in there or entry[0] in ("c0", "c1", "c2", "c3", "c4")]


def _end(sample: dict[str, Any]) -> float:
    known = [sample[name] for name in ("sent_s", "first_s", "last_s") if sample[name] is not None]
    return float(max(known))


def section(record: records.Record, source: str) -> str:
    """One record."""
    dataset = record["dataset"]
    facts = [("record", source), ("time", record.get("utc")), ("dataset", dataset.get("name")),
             ("requests", dataset.get("requests")), ("dataset's SHA-256", dataset.get("sha256")),
             ("sent", f"{record['mode']} loop, {record.get('concurrency')} at a time"),
             ("answers at most", record.get("max_tokens")), ("cache before", record.get("cache_before")),
             ("warm-up requests", record.get("warm_up")), ("wall", f"{record['wall_s']:.2f} s"),
             ("definitions", record["definitions"]), ("server's command", record["server"].get("command")),
             ("client's command", record.get("command")), ("health", records.health(record)),
             ("commit", record.get("commit")),
             ("machine", ", ".join(f"{name} {words}" for name, words in (record.get("machine") or {}).items()
                                   if not isinstance(words, list)))]
    notes = [f'<p class="missed">The times are not the server\'s alone: {escape(words)}.</p>'
             for words in records.disturbances(record)]
    intervals = record.get("intervals") or {}
    words = (f"Intervals: {intervals['level']:.0%}, by drawing {intervals['conversations']} conversations "
             f"{intervals['rounds']} times." if intervals.get("figures") else
             f"No intervals: {intervals.get('none') or 'nothing to draw from'} ({intervals['conversations']}; "
             f"{stats.LEAST_CONVERSATIONS} at least)." if intervals else "The record holds no intervals.")
    failed = Counter(sample["class"] for sample in record["samples"] if sample["class"] != "ok")
    outcome = ", ".join(f"{count} {name}" for name, count in failed.most_common())
    return (f"<section><h2>{escape(records.name(record))}</h2>" + "".join(notes)
            + (f'<p class="missed">Failed: {escape(outcome)}</p>' if failed else "")
            + gates(record) + table(["figure", "value and interval"],
                                    [[escape(name), value(record, path, form)] for name, path, form in TABLE], 9)
            + f'<p class="soft">{words}</p>'
            + f'<div class="plots">{timeline_plot(record)}{ttft_plot(record)}{output_plot(record)}{decode_plot(record)}'
            + f"{hits_plot(record)}</div>" + groups(record)
            + "<details><summary>How it was measured</summary>" + table(
                ["", ""], [[escape(name), f"<code>{escape(words)}</code>"] for name, words in facts
                           if words is not None], 9) + "</details></section>")


def groups(record: records.Record) -> str:
    """Figures by length of the prompt and by turn."""
    parts = []
    for title, key in (("By length of the prompt", "by_length"), ("By turn", "by_turn")):
        rows = []
        for group in definitions.groups(record["samples"])[key]:
            cells = [f"{group['succeeded']} of {group['requests']}"]
            for path, form in (("hit_rate", "{:.1%}"), ("hit_rate_theoretical", "{:.1%}"), ("ttft_s.p50", "{:.3f}"),
                               ("ttft_s.p90", "{:.3f}"), ("output_tps.p10", "{:.2f}"), ("decode_tps.p50", "{:.2f}")):
                number = stats.figure(group, path)
                cells.append("-" if number is None else form.format(number))
            rows.append([escape(group["group"]), *cells])
        parts.append(f"<h3>{title}</h3>" + table(
            ["", "succeeded", "hits", "possible", "TTFT P50", "TTFT P90", "output TPS P10", "decode TPS P50"], rows))
    return "<details open><summary>By length and turn</summary>" + "".join(parts) + "</details>"


def comparison(found: list[records.Record]) -> str:
    """Records against the first, if they can be compared."""
    try:
        compared = compare.compare(found)
    except records.RecordError as error:
        return f'<p class="soft">No comparison: {escape(error)}</p>'
    parts = []
    for one in compared:
        rows = [[*map(escape, compare.row(ratio))] for ratio in one["ratios"]]
        parts.append(f"<h3>{escape(one['other'])} against {escape(one['base'])}: {escape(one['verdict'])}</h3>"
                     + "".join(f'<p class="missed">Disturbed: {escape(line)}</p>' for line in one["disturbed"])
                     + table(compare.HEAD, rows))
    return "".join(parts)


def page(found: list[records.Record], sources: list[str]) -> str:
    """The whole page."""
    title = " / ".join(dict.fromkeys(records.name(record) for record in found))
    style = (STYLE.replace("LIGHT", plots.LIGHT).replace("DARK", plots.DARK) + plots.STYLE).strip()
    versions = ", ".join(dict.fromkeys(str(record["definitions"]) for record in found))
    several = ""
    if len(found) > 1:
        several = "<h2>Side by side</h2>" + table(
            ["figure", *(escape(records.name(record)) for record in found)],
            [*([escape(name), *(value(record, path, form) for record in found)] for name, path, form in TABLE),
             ["health", *(escape(records.health(record)) for record in found)]]) + comparison(found)
    return ('<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(title)}</title><style>\n{style}\n</style></head><body>"
            f'<h1>{escape(title)}</h1><p class="soft">Definitions {escape(versions)}; times in seconds, '
            f"TPS in tokens per second.</p>{several}"
            + "".join(section(record, source) for record, source in zip(found, sources, strict=True))
            + "</body></html>\n")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD")
    parser.add_argument("--out", "-o", type=Path, default=Path("report.html"), help="default: %(default)s")
    parser.add_argument("--markdown", action="store_true", help="print the ledger's tables; write no page")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    options = parse(arguments)
    try:
        found = [records.read(path) for path in options.records]
        if options.markdown:
            print(tables.formal_perf(found) + "\n" + tables.gates(found), end="")
            return 0
        options.out.write_text(page(found, [path.name for path in options.records]), encoding="utf-8")
    except (records.RecordError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        print(f"report: a record is not what formal_perf_bench.py keeps: {type(error).__name__}: {error}",
              file=sys.stderr)
        return 1
    print(f"written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
