"""What bench_peers.py found: for a terminal, and as the ledger's table."""
from typing import Any

from . import records
from .tables import grid, significant

Record = dict[str, Any]
MET = {True: "met", False: "not met", None: "not measured"}
TITLES = {1: "prefill", 2: "decode", 3: "warm TTFT", 4: "dataset", 5: "memory and start", 6: "front end", 7: "int8"}
# How figures are shown that are not in the unit of their name.
SCALES = {"front stream": (1e3, "ms of CPU per token"), "front prompt": (1e3, "ms of CPU per request"),
          "memory": (1e-9, "GB at most"), "decode": (1, "tok/s")}


def shown(record: Record) -> str:
    """The summary for a terminal."""
    found = ["  ".join(cell for cell in _figure(record, figure) if cell) for figure in record["figures"]]
    for line, verdict in _lines(record).items():
        rows, words = _tried(record, line)
        found.append(f"{line}. {TITLES[line]}: {verdict}{f' ({words})' if words else ''}")
        found += ["   " + "  ".join(cell for cell in _cells(row) if cell) for row in rows]
    found += [f"{name}: {words}" for name, words in _settings(record)]
    return "\n".join(found)


def bench_peers(found: list[Record]) -> str:
    """The lines with their rows, then every figure of every server, then what they were measured with."""
    rows, all_figures, notes = [], [], []
    for record in found:
        name = f"ours {record['commit'][:7]}"
        for line, verdict in _lines(record).items():
            tried, words = _tried(record, line)
            rows.append([name, f"**{line}. {TITLES[line]}**", *[""] * 4, f"**{verdict}**", words])
            rows += [[name, *_cells(row)] for row in tried]
        all_figures += [[name, *_figure(record, figure)] for figure in record["figures"]]
        notes += [[name, *words] for words in _settings(record)]
    return "\n".join((
        grid(["run", "figure", "ours", "best peer, or limit", "ratio (range of rounds)", "wanted", "verdict", "notes"],
             rows),
        grid(["run", "sitting", "figure", "server", "median (range of rounds)", "samples"], all_figures),
        grid(["run", "what", "words"], notes)))


def _tried(record: Record, line: int) -> tuple[list[Record], str]:
    """The rows of a line that somebody tried to measure, and how many nobody did."""
    rows = [row for row in record["rows"] if row["line"] == line]
    tried = [row for row in rows if row["ours"] is not None or row["notes"]]
    left = len(rows) - len(tried)
    return tried, f"{left} of its {len(rows)} figures were not tried" if left else ""


def _lines(record: Record) -> dict[int, str]:
    """JSON has no whole numbers as names."""
    return {int(line): verdict for line, verdict in record["lines"].items()}


def _cells(row: Record) -> list[str]:
    """A row, without its line."""
    other = ""
    if row["other"] is not None:
        other = f"{significant(row['other_value'])}, {row['other']}"
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.3g}" + (
        "" if row["range"] is None else " ({:.3g} to {:.3g})".format(*row["range"]))
    return [row["what"] + (" (not one of the line's)" if row["extra"] else ""),
            "-" if row["ours"] is None else significant(row["ours"]), other, ratio, row["wanted"], MET[row["met"]],
            "; ".join(row["notes"])]


def _figure(record: Record, figure: Record) -> list[str]:
    scale, unit = SCALES.get(figure["what"], (1, "s"))
    name = f"{figure['what']} {figure['size']:,}" if figure["size"] else figure["what"]
    words = f"failed: {figure.get('failed')}"
    if "median" in figure:
        words = "{} {} ({} to {})".format(significant(scale * figure["median"]), unit, *(
            significant(scale * figure[bound]) for bound in ("least", "most")))
        words += f", cached {figure['cached']:,.0f}" if "cached" in figure else ""
    server = records.SERVERS[figure["server"]]
    version = record["versions"].get(figure["server"]) if figure["server"] != "ours" else None
    return [figure["sitting"], name, f"{server} {version or ''}".strip(), words,
            f"{figure['samples']}{', disturbed' if figure['disturbed'] else ''}"]


def _settings(record: Record) -> list[tuple[str, str]]:
    """What a reader must know beside the figures."""
    rate = record["read_bytes_per_s"]
    found = [("machine", f"{record['machine']['processor']}, {record['machine']['cores']} cores, "
                         f"{', '.join(record['machine']['flags']) or 'no flags known'}"),
             ("memory is read with", "not measured" if rate is None else f"{rate / 1e9:.1f} GB/s at most"),
             ("checkpoints", f"{record['model']}, {record['second_model']}; {record['rounds']} rounds")]
    steps, prompts = ({int(size): value for size, value in record[name].items()} for name in ("step_bytes",
                                                                                               "prompt_flops"))
    found += [("a step reads at least", ", ".join(f"{value / 1e6:,.0f} MB for {size}"
                                                  for size, value in steps.items())),
              ("a prompt's token takes at least", ", ".join(
                  f"{value / 1e6:,.0f} MFLOP of {size:,}" for size, value in prompts.items()))]
    if record["reserved"]:
        found.append(("ours has put aside", ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in
                                                      record["reserved"].items() if name != "bytes")))
    return found + [("LEFT OUT", f"{records.SERVERS[one['server']]} ({one['checkpoint']} checkpoint): {one['why']}")
                    for one in record["left_out"]]


KINDS = {"bench-peers": bench_peers}
