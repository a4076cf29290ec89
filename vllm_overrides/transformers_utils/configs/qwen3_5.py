"""Configuration classes of the Qwen3.5 / Qwen3.6 hybrid models, for a transformers that does not know them.

They read what transformers 5 and the published checkpoints write: `config.json` with `text_config` and `vision_config`
(model types `qwen3_5_moe`, `qwen3_5`) or the text part alone (`..._text`). No size has a default: a size that the file
does not give is an error that names it. Source of the format: Hugging Face transformers 5, models/qwen3_5_moe.
"""
from typing import Any

from transformers import PretrainedConfig

FULL_ATTENTION = "full_attention"
LINEAR_ATTENTION = "linear_attention"


class _FileConfig(PretrainedConfig):
    """A configuration that only a file can give: without arguments it cannot be made."""
    has_no_defaults_at_init = True
    keys_to_ignore_at_inference = ["past_key_values"]

    def to_diff_dict(self) -> dict[str, Any]:
        """Returns everything: transformers would compare nested parts with an instance made without arguments."""
        return self.to_dict()


class Qwen3_5TextConfig(_FileConfig):
    """The language model of a dense checkpoint.

    Attributes beside the file's own:
        layer_types: per layer "linear_attention" or "full_attention"; from `full_attention_interval` where absent.
        layers_block_type: the same with stock's word "attention" for full attention, so that KV is counted for those
            only.
        rope_parameters: dict with rope_type, rope_theta, partial_rotary_factor and, where given, mrope_section.
            `rope_scaling` stays unset: stock would read it as a context extension.
        torch_dtype: from `dtype`, the name that transformers 5 writes.

    Raises:
        ValueError: a size or setting that is missing, or that contradicts another one; the message names it.
    """
    model_type = "qwen3_5_text"
    base_config_key = "text_config"
    required: tuple[str, ...] = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "max_position_embeddings", "rms_norm_eps", "linear_conv_kernel_dim", "linear_num_key_heads",
        "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "intermediate_size")

    def __init__(self, **kwargs: Any) -> None:
        _check_sizes(self.model_type, self.required, kwargs)
        rope_parameters = _rope_parameters(kwargs)
        layer_types = _layer_types(kwargs)
        kwargs["torch_dtype"] = _dtype(kwargs)
        kwargs.setdefault("tie_word_embeddings", False)
        kwargs.setdefault("hidden_act", "silu")
        kwargs.setdefault("attention_bias", False)
        super().__init__(**kwargs)
        self.rope_parameters = rope_parameters
        self.layer_types = layer_types

    @property
    def layers_block_type(self) -> list[str]:
        """Per layer "attention" (has KV) or "linear_attention"; stock counts the former to size the KV cache."""
        return ["attention" if kind == FULL_ATTENTION else kind for kind in self.layer_types]


class Qwen3_5MoeTextConfig(Qwen3_5TextConfig):
    """The language model of a mixture-of-experts checkpoint."""
    model_type = "qwen3_5_moe_text"
    required = tuple(name for name in Qwen3_5TextConfig.required if name != "intermediate_size") + (
        "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(f"num_experts_per_tok {self.num_experts_per_tok} is more than the "
                             f"{self.num_experts} experts there are")


class Qwen3_5VisionConfig(_FileConfig):
    """The vision tower.

    Attributes beside the file's own:
        image_mean, image_std: per channel, of values between 0 and 1; the published preprocessor's 1/2 where absent.

    Raises:
        ValueError: a size that is missing or no positive integer; means or deviations that are not one per channel.
    """
    model_type = "qwen3_5_vision"
    base_config_key = "vision_config"
    required = ("depth", "hidden_size", "num_heads", "intermediate_size", "in_channels", "patch_size",
                "spatial_merge_size", "temporal_patch_size", "out_hidden_size", "num_position_embeddings")

    def __init__(self, **kwargs: Any) -> None:
        _check_sizes(self.model_type, self.required, kwargs)
        for name in ("image_mean", "image_std"):
            values = kwargs.setdefault(name, [0.5] * kwargs["in_channels"])
            if len(values) != kwargs["in_channels"]:
                raise ValueError(f"{name} in the configuration of a {self.model_type} model is {values!r} for "
                                 f"{kwargs['in_channels']} channels")
        kwargs.setdefault("hidden_act", "gelu_pytorch_tanh")
        super().__init__(**kwargs)


class Qwen3_5MoeVisionConfig(Qwen3_5VisionConfig):
    """The vision tower of a mixture-of-experts checkpoint."""
    model_type = "qwen3_5_moe_vision"


class Qwen3_5Config(_FileConfig):
    """A dense checkpoint with its vision tower.

    Attributes beside the file's own: `text_config`, `vision_config` (None where the file has none) as configuration
    objects, `layers_block_type` of the language model (stock asks the top level) and `torch_dtype`.
    """
    model_type = "qwen3_5"
    sub_configs = {"text_config": Qwen3_5TextConfig, "vision_config": Qwen3_5VisionConfig}

    def __init__(self, **kwargs: Any) -> None:
        text = kwargs.pop("text_config", None)
        vision = kwargs.pop("vision_config", None)
        if not text:
            raise ValueError(f"the configuration of a {self.model_type} model lacks text_config")
        dtype = _dtype(kwargs)
        if isinstance(text, dict):
            text = dict(text)
            if dtype is not None and _dtype(dict(text)) is None:
                text["dtype"] = dtype
            text = self.sub_configs["text_config"](**text)
        if isinstance(vision, dict):
            # Published files give the tower the model type of the whole model.
            vision = self.sub_configs["vision_config"](**{k: v for k, v in vision.items() if k != "model_type"})
        kwargs["torch_dtype"] = text.torch_dtype if dtype is None else dtype
        # transformers ties by the top level alone; a file without the word there leaves it to the text part.
        kwargs.setdefault("tie_word_embeddings", text.tie_word_embeddings)
        self.text_config = text
        self.vision_config = vision
        super().__init__(**kwargs)

    @property
    def layers_block_type(self) -> list[str]:
        """Per layer of the language model "attention" (has KV) or "linear_attention"."""
        return self.text_config.layers_block_type


class Qwen3_5MoeConfig(Qwen3_5Config):
    """A mixture-of-experts checkpoint with its vision tower."""
    model_type = "qwen3_5_moe"
    sub_configs = {"text_config": Qwen3_5MoeTextConfig, "vision_config": Qwen3_5MoeVisionConfig}


CONFIG_CLASSES = (Qwen3_5Config, Qwen3_5MoeConfig, Qwen3_5TextConfig, Qwen3_5MoeTextConfig)


def _check_sizes(model_type: str, required: tuple[str, ...], kwargs: dict[str, Any]) -> None:
    missing = [name for name in required if kwargs.get(name) is None]
    if missing:
        raise ValueError(f"the configuration of a {model_type} model lacks {', '.join(missing)}")
    for name in required:
        value = kwargs[name]
        if name != "rms_norm_eps" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} in the configuration of a {model_type} model is {value!r}, "
                             f"not a positive integer")


def _dtype(kwargs: dict[str, Any]) -> Any | None:
    """Takes `dtype` and `torch_dtype` out of `kwargs` and returns the one given."""
    dtype = kwargs.pop("dtype", None)
    torch_dtype = kwargs.pop("torch_dtype", None)
    return dtype if dtype is not None else torch_dtype


def _layer_types(kwargs: dict[str, Any]) -> list[str]:
    layers = kwargs["num_hidden_layers"]
    interval = kwargs.get("full_attention_interval")
    kinds = kwargs.pop("layer_types", None)
    if kinds is None:
        if interval is None:
            raise ValueError("the configuration has neither layer_types nor full_attention_interval")
        kinds = [LINEAR_ATTENTION if (layer + 1) % interval else FULL_ATTENTION for layer in range(layers)]
    unknown = sorted(set(kinds) - {FULL_ATTENTION, LINEAR_ATTENTION})
    if unknown:
        raise ValueError(f"layer_types has {', '.join(map(repr, unknown))}; "
                         f"known are {FULL_ATTENTION!r} and {LINEAR_ATTENTION!r}")
    if len(kinds) != layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for num_hidden_layers {layers}")
    return list(kinds)


def _rope_parameters(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Takes the three spellings of the rotary settings out of `kwargs`: rope_parameters, rope_scaling, plain keys."""
    plain = {name: kwargs.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in kwargs}
    scaling = kwargs.pop("rope_scaling", None) or {}
    parameters = {**plain, **scaling, **(kwargs.pop("rope_parameters", None) or {})}
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    parameters.setdefault("partial_rotary_factor", 1.0)
    if parameters.get("rope_theta") is None:
        raise ValueError("the configuration lacks rope_theta (in rope_parameters)")
    factor, section = parameters["partial_rotary_factor"], parameters.get("mrope_section")
    rotary = int(kwargs["head_dim"] * factor)
    if rotary < 2 or rotary % 2:
        raise ValueError(f"head_dim {kwargs['head_dim']} with partial_rotary_factor {factor} gives {rotary} rotary "
                         f"dimensions, which is no even number above zero")
    if section is not None and sum(section) != rotary // 2:
        raise ValueError(f"mrope_section {section} adds up to {sum(section)}; head_dim {kwargs['head_dim']} with "
                         f"partial_rotary_factor {factor} has {rotary // 2} rotary pairs")
    return parameters
