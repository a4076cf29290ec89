"""Run by the reference environment's Python: transformers' operators of the model on random inputs, saved to a file.

    python transformers_operators.py OUT.pt

transformers has the definition of the model that the weights were published with; our references only restate it.
"""
import sys

import torch
import torch.nn.functional as F
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig


def delta_rule(gen: torch.Generator) -> dict:
    tokens, key_heads, heads, key, value = 150, 2, 6, 16, 24
    q, k = (torch.randn(1, tokens, key_heads, key, generator=gen) for _ in range(2))
    v = torch.randn(1, tokens, heads, value, generator=gen)
    a, b = (3 * torch.randn(1, tokens, heads, generator=gen) for _ in range(2))
    A_log, dt_bias = torch.randn(heads, generator=gen), torch.randn(heads, generator=gen)
    state = torch.randn(1, heads, key, value, generator=gen)
    g, beta = -A_log.float().exp() * F.softplus(a.float() + dt_bias), b.sigmoid()
    # What the layer does before the call: every value head gets its key head.
    wide_q, wide_k = (x.repeat_interleave(heads // key_heads, dim=2) for x in (q, k))
    options = {"g": g, "beta": beta, "initial_state": state, "output_final_state": True,
               "use_qk_l2norm_in_kernel": True}
    chunked, chunked_state = modeling.torch_chunk_gated_delta_rule(wide_q, wide_k, v, **options)
    stepwise, stepwise_state = modeling.torch_recurrent_gated_delta_rule(wide_q, wide_k, v, **options)
    return {"q": q, "k": k, "v": v, "a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias, "state": state, "g": g,
            "beta": beta, "chunked": chunked, "chunked_state": chunked_state, "stepwise": stepwise,
            "stepwise_state": stepwise_state}


def convolution(gen: torch.Generator) -> dict:
    x, weight = torch.randn(1, 10, 30, generator=gen), torch.randn(10, 4, generator=gen)
    whole = F.silu(F.conv1d(x, weight.unsqueeze(1), None, padding=3, groups=10)[..., :30])
    return {"x": x, "weight": weight, "y": whole}


def norms(gen: torch.Generator) -> dict:
    x, weight = torch.randn(5, 64, generator=gen), torch.randn(64, generator=gen)
    plain, gated = modeling.Qwen3_5MoeRMSNorm(64, eps=1e-6), modeling.Qwen3_5MoeRMSNormGated(64, eps=1e-6)
    plain.weight.data.copy_(weight)
    gated.weight.data.copy_(weight)
    z = torch.randn(5, 64, generator=gen)
    return {"x": x, "z": z, "weight": weight, "plain": plain(x), "gated": gated(x, z)}


def config() -> Qwen3_5MoeTextConfig:
    return Qwen3_5MoeTextConfig(
        hidden_size=48, head_dim=32, num_attention_heads=4, num_key_value_heads=2, num_experts=12,
        num_experts_per_tok=3, moe_intermediate_size=20, hidden_act="silu", max_position_embeddings=262144,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.75,
                         "mrope_interleaved": True, "mrope_section": [5, 4, 3]})


def rotary(gen: torch.Generator) -> dict:
    positions = torch.randint(0, 5000, (3, 1, 9), generator=gen)
    q, k = torch.randn(1, 4, 9, 32, generator=gen), torch.randn(1, 2, 9, 32, generator=gen)
    cos, sin = modeling.Qwen3_5MoeTextRotaryEmbedding(config())(q, positions)
    turned_q, turned_k = modeling.apply_rotary_pos_emb(q, k, cos, sin)
    return {"positions": positions, "q": q, "k": k, "turned_q": turned_q, "turned_k": turned_k}


def experts(gen: torch.Generator) -> dict:
    x = torch.randn(17, 48, generator=gen)
    router, bank = modeling.Qwen3_5MoeTopKRouter(config()), modeling.Qwen3_5MoeExperts(config())
    for parameter in (*router.parameters(), *bank.parameters()):
        parameter.data.copy_(torch.randn(parameter.shape, generator=gen) * parameter.shape[-1]**-0.5)
    logits, weights, ids = router(x)
    return {"x": x, "logits": logits, "weights": weights, "ids": ids, "w13": bank.gate_up_proj, "w2": bank.down_proj,
            "y": bank(x, ids, weights)}


def main() -> None:
    operators = (delta_rule, convolution, norms, rotary, experts)
    with torch.no_grad():
        torch.save({operator.__name__: {name: value.detach().clone() for name, value in
                                        operator(torch.Generator().manual_seed(number)).items()}
                    for number, operator in enumerate(operators)}, sys.argv[1])


if __name__ == "__main__":
    main()
