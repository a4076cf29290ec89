"""Sampling defaults from the model's own generation_config.json, for requests that are silent about them."""
import json
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

FILE = "generation_config.json"
# What stock's SamplingParams can take over, with the type that the file must have.
PARAMETERS: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
}


def get_default_sampling_params(model: Any, revision: str | None = None) -> dict[str, Any]:
    """Returns the parameters among temperature, top_p, top_k, min_p, repetition_penalty that the model's file sets.

    Args:
        model: a model folder, the name of a model in the local Hugging Face cache or hub, or vLLM's ModelConfig.
        revision: of a model that is not a folder; a ModelConfig brings its own.

    Returns:
        floats, and an int for top_k; empty where the model has no generation_config.json. `do_sample` is not looked
        at: whether a request samples is for its temperature to say.

    Raises:
        ValueError: the file is not a JSON object, or a value is not a number.
    """
    if hasattr(model, "hf_config"):
        model, revision = model.model, model.revision
    path = _find(str(model), revision)
    if path is None:
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return {name: _number(path, name, content[name], kind) for name, kind in PARAMETERS.items()
            if content.get(name) is not None}


def _find(model: str, revision: str | None) -> Path | None:
    if Path(model).is_dir():
        path = Path(model) / FILE
        return path if path.is_file() else None
    found = cached_file(model, FILE, revision=revision, _raise_exceptions_for_gated_repo=False,
                        _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False)
    return None if found is None else Path(found)


def _number(path: Path, name: str, value: Any, kind: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or kind(value) != value:
        raise ValueError(f"{name} in {path} is {value!r}, not {'an integer' if kind is int else 'a number'}")
    return kind(value)
