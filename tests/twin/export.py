"""Parameters of the training -> a checkpoint in the real format, bfloat16."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from config import generation_config, preprocessor_config
from model import EMBEDDING, Parameters
from safetensors.torch import save_file

LARGEST = 24_000_000


def export(parameters: Parameters, config: dict[str, Any], tokenizer: Path, out: Path) -> tuple[int, str]:
    """Writes `out`: model.safetensors, the configuration files, the tokenizer.

    Returns:
        bytes and SHA-256 of model.safetensors.

    Raises:
        ValueError: it is too large for the repository.
    """
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().bfloat16().contiguous() for name, value in sorted(parameters.items())}
    # Tied in training; the real configuration has a head of its own.
    tensors["lm_head.weight"] = tensors[EMBEDDING].clone()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    data = (out / "model.safetensors").read_bytes()
    if len(data) > LARGEST:
        raise ValueError(f"{len(data):,} bytes are more than {LARGEST:,}")
    content = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    ids = {token["content"]: token["id"] for token in content["added_tokens"]}
    for name, value in (
        ("config.json", config),
        ("generation_config.json", generation_config(ids)),
        ("preprocessor_config.json", preprocessor_config()),
    ):
        (out / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    for path in tokenizer.iterdir():
        shutil.copyfile(path, out / path.name)
    digest = hashlib.sha256(data).hexdigest()
    (out / "model.safetensors.sha256").write_text(f"{digest}  model.safetensors\n")
    return len(data), digest
