"""The training program's forward pass against transformers, on random weights in float32."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from config import twin_config  # noqa: E402
from delta_rule import delta_rule  # noqa: E402
from model import EMBEDDING, Network, initial, rows_of  # noqa: E402
from special import fake_ids  # noqa: E402

VOCABULARY = 300


@pytest.fixture(scope="module")
def config() -> dict:
    return twin_config(fake_ids(VOCABULARY), VOCABULARY)


@pytest.fixture(scope="module")
def parameters(config: dict) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    out = initial(config, 0)
    # Norms that start as the identity would hide a wrong one.
    return {
        name: value + 0.1 * torch.randn(value.shape, generator=generator) if value.ndim == 1 else value
        for name, value in out.items()
    }


@pytest.fixture(scope="module")
def reference(config: dict, parameters: dict[str, torch.Tensor]) -> torch.nn.Module:
    kind = transformers.models.qwen3_5_moe
    settings = kind.configuration_qwen3_5_moe.Qwen3_5MoeConfig(
        **{k: v for k, v in config.items() if k != "architectures"}
    )
    settings._attn_implementation = "eager"
    model = kind.modeling_qwen3_5_moe.Qwen3_5MoeForConditionalGeneration(settings).float().eval()
    state = {name: value for name, value in parameters.items() if not name.startswith("mtp.")}
    state["lm_head.weight"] = state[EMBEDDING]
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not missing and not unexpected, (missing, unexpected)
    return model


def test_packed_rows_give_the_logits_of_separate_chats(config, parameters, reference):
    lengths = (5, 1, 70, 2, 50, 300)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, VOCABULARY - 40, (1, sum(lengths)), generator=generator)
    chats = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None].expand(3, 1, -1)
    rows = rows_of(config, chats, positions, torch.float32)
    with torch.no_grad():
        hidden, _ = Network(config, torch.float32).trunk(parameters, parameters[EMBEDDING][ids], rows)
        ours = hidden @ parameters[EMBEDDING].T
        wanted = torch.cat([reference(input_ids=part).logits for part in ids.split(list(lengths), dim=1)], dim=1)
    error = (ours - wanted).abs().max().item()
    print("largest difference of a logit", error, "largest logit", wanted.abs().max().item())
    assert error < 2e-4 * wanted.abs().max().item()


@pytest.mark.parametrize("grid", [(4, 6), (16, 16), (10, 32)])
def test_picture(config, parameters, reference, grid):
    generator = torch.Generator().manual_seed(3)
    patches = torch.randn(grid[0] * grid[1], 3 * 2 * 16 * 16, generator=generator)
    with torch.no_grad():
        ours = Network(config, torch.float32).picture(parameters, patches, grid)
        wanted = reference.model.visual(patches, torch.tensor([[1, *grid]])).pooler_output
    error = (ours - wanted).abs().max().item()
    print("largest difference of an embedding", error, "largest", wanted.abs().max().item())
    assert error < 1e-4 * wanted.abs().max().item()


def test_gradients_of_the_delta_rule():
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v = random(2, 37, 2, 64) * 0.2, random(2, 37, 2, 64) * 0.2, random(2, 37, 4, 64)
    g, beta = -random(2, 37, 4).abs(), random(2, 37, 4).sigmoid()
    fresh = torch.rand(2, 37, generator=generator) < 0.1
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]
    weight = random(2, 37, 4, 64)
    out, _ = delta_rule(*inputs, fresh)
    ours = torch.autograd.grad((out * weight).sum(), inputs)
    again, states = [], torch.zeros(2, 4, 64, 64)
    for t in range(37):
        keys, queries = (x[:, t].repeat_interleave(2, 1) for x in (k, q))
        states = states * (g[:, t].exp() * ~fresh[:, t, None])[..., None, None]
        change = (v[:, t] - torch.einsum("bhkv,bhk->bhv", states, keys)) * beta[:, t, :, None]
        states = states + keys[..., None] * change[:, :, None]
        again.append(torch.einsum("bhkv,bhk->bhv", states, queries))
    wanted = torch.autograd.grad((torch.stack(again, 1) * weight).sum(), inputs)
    torch.testing.assert_close(out, torch.stack(again, 1), rtol=1e-5, atol=1e-5)
    for name, one, other in zip(("q", "k", "v", "g", "beta"), ours, wanted, strict=True):
        torch.testing.assert_close(
            one, other, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"gradient of {name}: {text}"
        )
