"""vLLM finds the architectures without starting a child process, and what is said of them is true."""
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from vllm.model_executor.models import ModelRegistry, registry
from vllm.overlay.model.registration import ARCHITECTURES


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_described_as_stock_would_find(architecture, monkeypatch):
    def no_child(_):
        raise AssertionError("a child process was started")

    monkeypatch.setattr(registry, "_run_in_subprocess", no_child)
    model_class, name = ModelRegistry.resolve_model_cls([architecture])
    assert (model_class.__name__, name) == (architecture, architecture)
    assert model_class.__module__ == "vllm.model_executor.models.qwen3_5"
    said = ModelRegistry.inspect_model_cls([architecture])
    assert said == registry._ModelInfo.from_model_cls(model_class)


def test_real_qwen_classes_are_untouched():
    ours = [name for name, model in ModelRegistry.models.items() if "qwen3_5" in getattr(model, "module_name", "")]
    assert sorted(ours) == sorted(ARCHITECTURES)
    assert ModelRegistry.models["Qwen2MoeForCausalLM"].module_name == "vllm.model_executor.models.qwen2_moe"


def test_an_unknown_architecture_is_named():
    with pytest.raises(ValueError, match=r"Model architectures \['Qwen3_5Nothing'\] are not supported"):
        ModelRegistry.resolve_model_cls(["Qwen3_5Nothing"])


def test_a_tokenizer_without_a_class_is_taken_for_qwens(tmp_path):
    published = Path(__file__).resolve().parents[2] / "worklogs/model/config.json"
    (tmp_path / "config.json").write_text(json.dumps(json.loads(published.read_text())))
    Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")])).save(str(tmp_path / "tokenizer.json"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert type(tokenizer).__name__ == "Qwen2TokenizerFast"
    assert tokenizer.encode("abb") == [2, 1]
