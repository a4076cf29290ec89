"""The exported checkpoint in our engine: it loads whole and decodes what the training's forward pass expects."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from config import twin_config  # noqa: E402
from model import EMBEDDING, Network, initial, rows_of  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from special import fake_ids  # noqa: E402

from tests.helpers.tiny_models import greedy, make_engine, run  # noqa: E402

VOCABULARY, NEW = 800, 8


def test_greedy_tokens(tmp_path, monkeypatch):
    import json

    monkeypatch.setenv("VLLM_OVERLAY_MTP", "1")
    config = twin_config(fake_ids(VOCABULARY), VOCABULARY)
    parameters = initial(config, 3)
    save_file({**parameters, "lm_head.weight": parameters[EMBEDDING].clone()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(0, VOCABULARY - 40, (length,), generator=generator).tolist() for length in (3, 70, 200)]
    engine = make_engine(tmp_path)
    outputs = run(engine, prompts, greedy(NEW))
    model = engine.model_executor.driver_worker.model_runner.model
    assert model.mtp is not None, "the head was not loaded"
    for prompt, output in zip(prompts, outputs, strict=True):
        got = list(output.outputs[0].token_ids)
        ids = torch.tensor([prompt + got])
        positions = torch.arange(ids.shape[1]).expand(3, 1, -1)
        rows = rows_of(config, torch.zeros_like(ids), positions, torch.float32)
        with torch.no_grad():
            hidden, _ = Network(config, torch.float32).trunk(parameters, parameters[EMBEDDING][ids], rows)
            best = (hidden @ parameters[EMBEDDING].T).argmax(-1)[0, len(prompt) - 1 : -1].tolist()
        print(len(prompt), "engine", got, "training", best)
        assert got == best
