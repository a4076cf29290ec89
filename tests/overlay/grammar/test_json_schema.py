"""JSON Schema: the official suite, and 200 schemas as they come, which compile or are refused by name."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import re
import time
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.helpers import json_schema_suite as suite
from tests.helpers.fake_engine import EOS, ids, tokenizer
from tests.helpers.random_schemas import Schemas
from vllm.overlay.grammar.constraint import Constraint
from vllm.overlay.grammar.follower import Follower
from vllm.overlay.serving.constrain import Constrainer, Markers
from vllm.overlay.serving.errors import RequestError
from vllm.overlay.serving.structured import read_structure

# The only instances of the suite that a grammar takes and must not.
NOT_COUNTED = {"format: date": "days of February", "format: date-time": "leap seconds", "format: time": "leap seconds",
               "optional: ecmascript-regex": "the white space of width zero, which is none in Unicode"}
GENERATED = 180


@pytest.fixture(scope="module")
def found() -> dict[str, suite.Keyword]:
    try:
        return suite.check()
    except FileNotFoundError as missing:
        pytest.skip(str(missing))


def test_no_wrong_instance_is_taken(found):
    wrong = {name: keyword.invalid for name, keyword in found.items() if keyword.invalid and name not in NOT_COUNTED}
    assert not wrong, wrong
    assert sum(keyword.rejected for keyword in found.values()) > 420, "so many wrong instances were tried"


def test_what_is_never_written_is_another_way_to_write_the_same(found):
    """Another order of properties, 1.0 for 1, and formats that the suite counts as comments."""
    narrower = [(name, case) for name, keyword in found.items() for case in keyword.narrower]
    allowed = re.compile("float|1.0|0.0|fractional|property order|only an annotation|0 does not match|quoted.string|"
                         "mixed format|allOf: allOf|email|IP|zero-width|overflow")
    other = [case for case in narrower if not allowed.search(": ".join(case))]
    assert not other and len(narrower) < 60, other


def test_what_is_refused_is_left_out_where_it_need_not_be_kept_to(found):
    """All but what no grammar can be made of: references to other documents, numbers out of range, broken
    expressions, and patterns of properties that overlap."""
    neither = {name: (keyword.left_out, keyword.refused) for name, keyword in found.items()
               if keyword.left_out < len(keyword.refused)}
    assert neither.keys() <= {"dynamicRef", "refRemote", "vocabulary", "multipleOf", "patternProperties", *(
        f"optional: {name}" for name in ("bignum", "cross-draft", "ecmascript-regex", "format-assertion"))}, neither
    assert sum(keyword.left_out for keyword in found.values()) > 170


def test_the_table_in_the_docs_is_this_one(found):
    assert suite.documented() == suite.table(found), "python -m tests.helpers.json_schema_suite writes it anew"


def vendored() -> dict[str, Any]:
    """Schemas of well-known configuration files, up to 2 MB long."""
    spec = importlib.util.find_spec("check_jsonschema")
    assert spec and spec.origin, "check-jsonschema is missing: bash requirements/setup.sh test installs it"
    found = (Path(spec.origin).parent / "builtin_schemas").rglob("*.json")
    return {one.name: json.loads(one.read_text(encoding="utf-8")) for one in found}


def walk(grammar: str, vocabulary, seed: int) -> str | None:
    """A text of the grammar, chosen at random among short ones; None where that takes too long."""
    from llguidance import LLMatcher

    one = Follower(Constraint(grammar), LLMatcher(vocabulary, grammar, log_level=0), ends=(EOS, ))
    rng, tokens, closing = random.Random(seed), [], set(ids('"')) | set(ids("}")) | set(ids("]")) | {EOS}
    mask = np.empty(-(-len(tokenizer()) // 32), np.uint32)
    while len(tokens) < 400:
        one.follow(tokens)
        one.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        assert one.finish(mask), one.failed
        allowed = np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0].tolist()
        ending = [token for token in allowed if token in closing]
        token = rng.choice(ending if ending and rng.random() < 0.4 else allowed)
        if token == EOS:
            return tokenizer().decode(tokens)
        tokens.append(token)
    return None


@pytest.mark.parametrize("strict", [True, False])
def test_two_hundred_schemas_compile_or_are_refused_by_name(strict, vocabulary):
    """Random outputs of those that compile are instances of the schema, by jsonschema's own judgement."""
    schemas = {**vendored(), **{f"generated {seed}": Schemas(seed).one() for seed in range(GENERATED)}}
    assert len(schemas) >= 200
    constrainer = Constrainer(tokenizer(), Markers())
    compiled, refused, checked, slowest = [], {}, 0, 0.0
    for name, schema in schemas.items():
        began = time.perf_counter()
        try:
            structure = read_structure({"response_format": {"type": "json_schema", "json_schema": {
                "name": "x", "schema": schema, "strict": strict}}})
            constraint = asyncio.run(asyncio.wait_for(constrainer.of_completion(structure), 90))
            compiled.append(name)
        except RequestError as error:
            assert error.status == 400 and error.param.startswith("response_format.json_schema") and error.message
            assert "\n" not in error.message and len(error.message) < 600, error.message
            refused[name] = error.message
            continue
        finally:
            slowest = max(slowest, time.perf_counter() - began)
        if strict and name.startswith("generated"):
            text = walk(constraint.grammar, vocabulary, len(name))
            if text is not None:
                jsonschema.Draft202012Validator(schema).validate(json.loads(text))
                checked += 1
    constrainer.close()
    print(f"{len(compiled)} compiled, {len(refused)} refused, {checked} outputs checked, slowest {slowest:.2f} s")
    assert len(compiled) >= (80 if strict else 120) and len(refused) >= 10, (len(compiled), refused)
    assert slowest < 20 and (not strict or checked >= 60), (slowest, checked)
