"""The needle program against the twin: it measures, and all questions to a text but the first find it computed."""

from __future__ import annotations

import json

import pytest

from tests.meaning.served import LOST
from worklogs import needle_recall

# Tokens of the question, and of the template behind it.
QUESTION = 32


@pytest.mark.parametrize("lengths", [(250, 1000), pytest.param((2000, 4000, 8000), marks=pytest.mark.long)],
                         ids=["short", "long"])
def test_needles(plain, tmp_path, lengths, capsys):
    status = needle_recall.main(["--base-url", plain.base, "--lengths", ",".join(map(str, lengths)), "--depths",
                                 "0,50,100", "--documents", "1", "--keep", "ours", "--out", str(tmp_path)])
    said = capsys.readouterr()
    assert status == 0, said.err
    (path,) = tmp_path.iterdir()
    samples = json.loads(path.read_text())["samples"]
    print(said.out, *samples, sep="\n")
    assert [sample["length"] for sample in samples] == [length for length in lengths for _ in range(3)]
    for number, sample in enumerate(samples):
        assert abs(sample["prompt"] - sample["length"]) < 0.1 * sample["length"], sample
        known = sample["prompt"] - QUESTION if number % 3 else 0
        assert known - LOST <= sample["cached"] < known + LOST + QUESTION, sample
