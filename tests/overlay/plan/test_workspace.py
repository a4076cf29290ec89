"""The planned workspace of a step against the peak that the allocator counts: small models, each with its peak in
another phase, one step each, within 10 %."""
import pytest
import torch

from tests.models.shapes import moe, prompt, text
from tests.overlay.plan.measure import engine_of, make_config, peak_of_step
from vllm.overlay.kernels.backend import operators
from vllm.overlay.kernels.causal_conv1d import torch_impl as conv
from vllm.overlay.kernels.norms import torch_impl as norms
from vllm.overlay.kernels.paged_attention import torch_impl as paged
from vllm.overlay.kernels.rope import torch_impl as rope
from vllm.overlay.plan.sizes import Sizes
from vllm.overlay.plan.workspace import Step, decoder_bytes, decoder_phases

TOKENS = 1100
# The phase whose bytes are the peak, on the CPU and on a card, and the model. A card's SwiGLU cannot be had here.
MODELS = {
    "scores": ("attention, scores", "attention, scores", torch.bfloat16,
               text(128, 4, 4, (4, 2, 64), (1, 1, 16, 16), 4, 0.25, **moe(4, 2, 16, 16))),
    "recurrent": ("linear attention, convolution", "linear attention, convolution", torch.float32,
                  text(96, 4, 4, (1, 1, 32), (1, 1, 512, 64), 4, 0.25, intermediate_size=64)),
    "values": ("linear attention, delta rule", "linear attention, gated norm", torch.bfloat16,
               text(64, 2, 2, (1, 1, 16), (1, 8, 16, 128), 2, 0.25, intermediate_size=32)),
    "experts": ("experts", "experts", torch.float32,
                text(512, 2, 2, (1, 1, 32), (1, 1, 16, 16), 4, 0.25, **moe(4, 2, 64, 16))),
    "dense": ("MLP", None, torch.float32,
              text(128, 2, 2, (1, 1, 16), (1, 1, 16, 16), 4, 0.25, intermediate_size=1024)),
    "wide": ("norms", "norms", torch.float32,
             text(896, 2, 2, (1, 1, 16), (1, 1, 16, 16), 4, 0.25, intermediate_size=64)),
}


@pytest.fixture(autouse=True)
def pytorch(monkeypatch):
    """The plan is that of the PyTorch back ends; the compiled ones take less, and partly not from torch's allocator."""
    for backends in operators().values():
        monkeypatch.setattr(backends, "_chosen", ("torch", backends.load("torch")))


def like_a_card(monkeypatch) -> None:
    """The back ends' sizes of tiles on a card."""
    for module in (norms, rope, conv):
        monkeypatch.setattr(module, "row_blocks", lambda rows, width, device: iter([slice(0, rows)]))
    monkeypatch.setattr(paged, "_SCORES_CPU", paged._SCORES)


@pytest.mark.parametrize("name", MODELS)
def test_planned_is_measured(tmp_path, monkeypatch, name):
    """All tokens are equal: they choose the same experts, the worst that can come."""
    *expected, dtype, fields = MODELS[name]
    engine = engine_of(make_config(tmp_path / "model", {**fields, "vocab_size": 512}), TOKENS, dtype=str(dtype)[6:])
    sizes = Sizes.of(engine.model_config.hf_config.get_text_config(), 1, dtype)
    peak_of_step(engine, [[5] * TOKENS])
    for device, phase in zip(("cpu", "cuda"), expected, strict=True):
        if phase is None:
            continue
        if device == "cuda":
            like_a_card(monkeypatch)
        measured = peak_of_step(engine, [[7] * TOKENS])
        phases = decoder_phases(sizes, Step(TOKENS, 1, TOKENS, device))
        planned = max(phases.values())
        print(f"{name} as on {device}: measured {measured:,}, planned {planned:,}, {planned / measured:.3f}")
        assert abs(planned / measured - 1) < 0.1, (device, measured, phases)
        assert max(phases, key=phases.get) == phase, (device, phases)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drawing_tokens(tmp_path, dtype):
    """Few tokens over a large vocabulary."""
    fields = text(32, 2, 2, (1, 1, 16), (1, 1, 16, 16), 4, 0.25, intermediate_size=16)
    engine = engine_of(make_config(tmp_path / "model", {**fields, "vocab_size": 60_000}), 64, dtype=str(dtype)[6:])
    sizes = Sizes.of(engine.model_config.hf_config.get_text_config(), 1, dtype)
    prompts = [prompt(length) for length in (9, 12, 15, 11)]
    sampling = {"temperature": 1.0, "top_p": 0.99, "top_k": 59_999}
    peak_of_step(engine, prompts, **sampling)
    measured = peak_of_step(engine, prompts, **sampling)
    phases = decoder_phases(sizes, Step(47, 4, 47, "cpu"))
    planned = phases["drawing tokens"]
    print(f"measured {measured:,}, planned {planned:,}, {planned / measured:.3f}")
    assert planned == max(phases.values()) and abs(planned / measured - 1) < 0.1, (measured, phases)


def test_int8_weights(tmp_path):
    """Beside the rest one tile of a weight comes back to the model's dtype; an upper bound."""
    fields = text(256, 2, 2, (2, 2, 32), (1, 1, 16, 16), 4, 0.25, intermediate_size=512)
    engine = engine_of(make_config(tmp_path / "model", {**fields, "vocab_size": 512}), 300,
                       quantization="int8_weight_only")
    sizes = Sizes.of(engine.model_config.hf_config.get_text_config(), 1, torch.float32)
    peak_of_step(engine, [[5] * 300])
    measured = peak_of_step(engine, [[7] * 300])
    planned = decoder_bytes(sizes, Step(300, 1, 300, "cpu", quantised=True))
    print(f"measured {measured:,}, planned {planned:,}, {planned / measured:.3f}")
    assert measured <= planned < 2 * measured, (measured, planned)
