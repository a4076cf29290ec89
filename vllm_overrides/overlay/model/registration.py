"""Makes vLLM and transformers know the Qwen3.5 architectures and model types, and vLLM our quantisation. `register()`
runs once, on `import vllm`.

Stock finds out what a model class can do by importing it in a child process, which costs seconds per start and turns
any error there into "not supported". The properties of our classes are few and fixed, so they are stated here; a test
compares them with what stock would have found.

"Multimodal" is what stock calls a model whose pictures go stock's own way: no chunked prefill, no prefix caching, dummy
pictures in the profile run, a limit of one picture. Ours go another (vllm.overlay.pictures), so to stock they are none.
"""
from dataclasses import dataclass

from transformers import AutoConfig, AutoTokenizer, Qwen2Tokenizer, Qwen2TokenizerFast

from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from vllm.model_executor.models import registry as _registry
from vllm.overlay.model import int8
from vllm.transformers_utils.configs.qwen3_5 import CONFIG_CLASSES

MODEL_MODULE = "vllm.model_executor.models.qwen3_5"
ARCHITECTURES = ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM",
                 "Qwen3_5ForCausalLM")


@dataclass(frozen=True)
class _DescribedModel(_registry._LazyRegisteredModel):
    """A model class imported only to be built; what it can do is known without importing it."""

    def inspect_model_cls(self) -> _registry._ModelInfo:
        return _registry._ModelInfo(is_text_generation_model=True,
                                    is_embedding_model=False,
                                    supports_multimodal=False,
                                    supports_pp=False,
                                    has_inner_state=False,
                                    is_attention_free=False)


def register() -> None:
    """Adds the architectures to vLLM's model registry, int8_weight_only to its quantisations, the model types to
    transformers' AutoConfig and AutoTokenizer.

    A transformers that brings its own classes for these model types is overruled in this process: stock needs
    `layers_block_type` and `torch_dtype`, which only ours have.
    """
    for architecture in ARCHITECTURES:
        _registry.ModelRegistry.models[architecture] = _DescribedModel(MODEL_MODULE, architecture)
    QUANTIZATION_METHODS[int8.NAME] = int8.Int8WeightOnlyConfig
    for config_class in CONFIG_CLASSES:
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        # Asked for only where tokenizer_config.json is missing or names no class.
        AutoTokenizer.register(config_class, Qwen2Tokenizer, Qwen2TokenizerFast, exist_ok=True)
