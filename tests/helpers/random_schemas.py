"""JSON schemas drawn from a seed: every keyword, and some that are no schemas."""

from __future__ import annotations

import random
from typing import Any


class Schemas:
    """Random schemas of all keywords, some of them wrong. Few of the generated are impossible."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def one(self, depth: int = 0) -> Any:
        rng = self.rng
        kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
        if depth < 3:
            kinds += ["object", "object", "array", "anyOf", "allOf", "oneOf", "types", "odd"]
        kind = rng.choice(kinds)
        make = getattr(self, kind, None)
        return make(depth) if make else {"type": kind}

    def string(self, _: int) -> Any:
        rng = self.rng
        return {"type": "string", **rng.choice([
            {}, {"minLength": rng.randint(0, 5), "maxLength": rng.randint(3, 40)},
            {"format": rng.choice(["date", "email", "uuid", "ipv4", "date-time", "regex", "haiku"])},
            {"pattern": rng.choice(["^a+$", "x", "[0-9]{2,3}", "^(a|b)+$", "(?=a)", "\\bx", "[z-a]", "^\\d{3}$"])}])}

    def integer(self, _: int) -> Any:
        rng = self.rng
        return {"type": rng.choice(["integer", "number"]), **rng.choice([
            {}, {"minimum": rng.randint(-50, 50)}, {"minimum": 1, "exclusiveMaximum": rng.randint(0, 1000)},
            {"multipleOf": rng.choice([2, 0.5, 7, -3])}, {"maximum": 10**rng.randint(1, 30)}])}

    def enum(self, _: int) -> Any:
        return {"enum": self.rng.choice([["a", "b"], [1, "x", None], [{"a": 1}, [1, 2]], [], ["é", "\"", "\\"]])}

    def const(self, _: int) -> Any:
        return {"const": self.rng.choice(["x", 5, None, {"a": [1]}, -0.5])}

    def object(self, depth: int) -> Any:
        rng = self.rng
        names = rng.sample(["name", "age", "é", "a b", "x\"y", "", "list"], rng.randint(0, 4))
        return {"type": "object", "properties": {name: self.one(depth + 1) for name in names},
                "required": rng.sample(names, rng.randint(0, len(names))), **rng.choice([
                    {}, {"additionalProperties": False}, {"additionalProperties": self.one(depth + 1)},
                    {"patternProperties": {"^x": self.one(depth + 1)}}, {"minProperties": 1}, {"propertyNames": {}},
                    {"dependentRequired": {"a": ["b"]}}])}

    def array(self, depth: int) -> Any:
        rng = self.rng
        return {"type": "array", "items": self.one(depth + 1), **rng.choice([
            {}, {"minItems": rng.randint(0, 3), "maxItems": rng.randint(1, 5)}, {"prefixItems": [self.one(depth + 1)]},
            {"uniqueItems": rng.choice([True, False])}, {"contains": {"type": "string"}}])}

    def combined(self, depth: int, keyword: str) -> Any:
        return {keyword: [self.one(depth + 1) for _ in range(self.rng.randint(1, 3))]}

    def anyOf(self, depth: int) -> Any:
        return self.combined(depth, "anyOf")

    def oneOf(self, depth: int) -> Any:
        return self.combined(depth, "oneOf")

    def allOf(self, depth: int) -> Any:
        return self.combined(depth, "allOf")

    def types(self, _: int) -> Any:
        return {"type": self.rng.sample(["string", "integer", "null", "boolean", "array"], 2)}

    def odd(self, depth: int) -> Any:
        return self.rng.choice([
            {}, True, False, {"$ref": "#"}, {"$ref": "#/$defs/no"}, {"type": "wat"}, {"not": {}}, {"type": []},
            {"if": {"type": "string"}, "then": {"minLength": 2}},
            {"$ref": "#/$defs/n", "$defs": {"n": self.one(depth + 1)}},
            {"properties": []}, {"required": "x"}, {"items": [1]}, {"minLength": "x"}, {"enum": "x"}, {"maxItems": -1}])
