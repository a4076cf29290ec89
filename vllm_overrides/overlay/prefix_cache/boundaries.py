"""Places in a prompt that a later prompt may share, as whoever makes prompts knows them: ends of messages."""
from collections.abc import Mapping
from itertools import pairwise
from typing import Any


def take_boundaries(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a request's inputs with its boundaries under "boundaries" (a tuple, empty for none), and not in
    multi_modal_data, by which stock hands them through.

    inputs: stock's LLMInputs. Boundaries are numbers of tokens before a place.

    Raises:
        ValueError: they are no ascending integers above 0 and below the number of the prompt's tokens. One line.
    """
    data = inputs.get("multi_modal_data")
    if not isinstance(data, Mapping) or "boundaries" not in data:
        return {**inputs, "boundaries": ()}
    found = data["boundaries"]
    if not isinstance(found, list | tuple) or not all(type(place) is int for place in found):
        raise ValueError(f"multi_modal_data['boundaries'] is no list of integers: {found!r:.80}")
    length = len(inputs["prompt_token_ids"])
    if any(first >= second for first, second in pairwise((0, *found, length))):
        raise ValueError(f"multi_modal_data['boundaries'] must ascend from above 0 to below {length}, the number of "
                         f"the prompt's tokens: {found!r:.80}")
    rest = {kind: value for kind, value in data.items() if kind != "boundaries"}
    return {**inputs, "multi_modal_data": rest or None, "boundaries": tuple(found)}
