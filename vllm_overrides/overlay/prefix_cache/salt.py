"""Whoever sends a `cache_salt` shares cached prefixes only with those who send the same: nobody else can learn from an
answer's time, or its cached tokens, whether a prompt has been asked before (vLLM's field of that name).

The salt goes into the content of the first token, so into every hash of the chain (`content_hash`), and into nothing
that the model sees.
"""
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

# Salted ids are negative, so no token's and no picture's (`vllm.overlay.pictures.hashing`).
_LOWEST = -(1 << 63)


def take_salt(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a request's inputs with its salt under "cache_salt" (None for none), and not in multi_modal_data, by
    which stock hands it through.

    inputs: stock's LLMInputs.

    Raises:
        ValueError: it is no string, or an empty one. One line.
    """
    data = inputs.get("multi_modal_data")
    if not isinstance(data, Mapping) or "cache_salt" not in data:
        return {**inputs, "cache_salt": None}
    salt = data["cache_salt"]
    if not isinstance(salt, str) or not salt:
        raise ValueError(f"multi_modal_data['cache_salt'] is no text: {salt!r:.80}")
    rest = {kind: value for kind, value in data.items() if kind != "cache_salt"}
    return {**inputs, "multi_modal_data": rest or None, "cache_salt": salt}


def salted_id(salt: str, hash_id: int) -> int:
    """Returns what stands for the first token's hash id in a prompt with this salt: an int64 below 0."""
    content = hash_id.to_bytes(8, "little", signed=True) + salt.encode("utf-8", "surrogatepass")
    return _LOWEST + int.from_bytes(blake2b(content, digest_size=8).digest(), "little") % (1 << 63)
