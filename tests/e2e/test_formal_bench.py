"""A dataset with all its oddities, and the formal bench, against the real server: both count prompts alike, and the
cache finds what the dataset says can be found."""
import json

from tests.helpers.demo_checkpoint import demo_checkpoint
from worklogs import formal_perf_bench, generate_official_like_dataset


def measured(demo, path, out, *words):
    """(exit status, record)."""
    status = formal_perf_bench.main([str(path), "--base-url", demo.base, "--kind", "ours", "--out", str(out),
                                     "--no-progress", "--max-tokens", "4", "--rounds", "20", *words])
    (record, ) = out.glob("*.json")
    return status, json.loads(record.read_text())


def test_the_dataset_and_the_server_count_alike(demo, tmp_path, capsys):
    assert generate_official_like_dataset.main([
        "--tokenizer", str(demo_checkpoint()), "--requests", "12", "--seed", "1", "--cap", "2K", "--bucket", "1K:1:0.3",
        "--bucket", "8K:5:0.8", "--pictures", "0.25", "--multi-system", "0.25", "--systems", "raw", "--oddities", "1",
        "--out", str(tmp_path), "--no-progress"]) == 0
    (path, ) = tmp_path.glob("*.jsonl")
    status, first = measured(demo, path, tmp_path / "reset", "--cache", "reset")
    print(capsys.readouterr().out)
    assert status == 0 and first["summary"]["classes"] == {"ok": 12}
    assert first["tokenizer"] == {"compared": 12, "disagree": 0} and first["cache_before"] == "reset"
    # Nothing can be found that the dataset does not repeat; a prefix of a few hundred tokens is.
    for sample in first["samples"]:
        assert sample["cached_tokens"] <= sample["theoretical_reuse"], sample
    summary = first["summary"]
    assert summary["hit_rate_theoretical"] > 0.4 and summary["hit_rate"] > 0.8 * summary["hit_rate_theoretical"]
    # Without a salt the second run would find everything.
    _, second = measured(demo, path, tmp_path / "salted", "--exact-tokens")
    assert second["cache_before"] == "salted"
    assert [sample["cached_tokens"] for sample in second["samples"]] == [sample["cached_tokens"]
                                                                        for sample in first["samples"]]
    assert all(sample["completion_tokens"] == 4 for sample in second["samples"])
