"""Runs in the reference environment: makes the random checkpoints and says what Hugging Face transformers computes.

    python reference_program.py OUT SLICE

OUT/<shape>/ becomes a checkpoint, OUT/<shape>.npz its reference: per prompt of n tokens `tokens<n>` (greedy) and
`logprobs<n>` [n + new tokens, vocabulary] float32, the distribution after each token; and `spread`, how far
transformers is from itself on the longest prompt, fed whole and token by token.

A shape with pictures also has `picture_tokens` and `picture_logprobs` of shapes.picture_prompt; `picture_spread`, how
far transformers is there from itself with its other attention, at most and in the mean square; and the pictures'
`embeddings` and `embeddings_bfloat16` [tokens of all pictures, hidden]: float32, and what the model in bfloat16 makes.

SLICE is a bench slice; OUT/slice.npz holds the same of it in float32, and of bfloat16 and float16 (teacher-forced by
the float32 tokens) `<dtype>_<n>`, and `<dtype>_chunked_<n>`, the same again in pieces of 16.
"""
import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent))
from shapes import (  # noqa: E402
    IMAGE_TOKEN,
    NEW_TOKENS,
    PROMPT_LENGTHS,
    SHAPES,
    SLICE_LENGTHS,
    Shape,
    grids,
    picture_prompt,
    pixels,
    prompt,
)

PIECE = 16


def configuration(shape: Shape) -> transformers.PretrainedConfig:
    family = shape.architecture.split("For")[0]
    text = getattr(transformers, f"{family}TextConfig")(**shape.text, tie_word_embeddings=shape.tied)
    if shape.vision is None:
        return text
    return getattr(transformers, f"{family}Config")(text_config=text.to_dict(), vision_config=dict(shape.vision),
                                                    image_token_id=IMAGE_TOKEN, tie_word_embeddings=shape.tied)


def randomise(model: torch.nn.Module) -> None:
    """Values that keep every part alive; transformers' own start has zero norms and decays that forget at once."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("A_log"):
            value = torch.log(torch.rand(parameter.shape, generator=generator) * 15 + 1)
        elif name.endswith("dt_bias"):
            value = noise - 4
        elif name.endswith(("linear_attn.norm.weight", "norm1.weight", "norm2.weight", "merger.norm.weight")):
            value = 1 + 0.2 * noise
        elif name.endswith("patch_embed.proj.weight"):
            value = noise * parameter[0].numel()**-0.5
        elif name.endswith("attn.qkv.weight"):
            value = 2 * noise * parameter.shape[-1]**-0.5
        elif parameter.dim() == 1:
            value = 0.2 * noise
        elif "conv1d" in name:
            value = noise * parameter.shape[-1]**-0.5
        elif name.endswith("embed_tokens.weight"):
            value = noise * 2 * parameter.shape[-1]**-0.5
        else:
            value = noise * (2 if "lm_head" in name else 1) * parameter.shape[-1]**-0.5
        parameter.data.copy_(value)
    model.tie_weights()


def save(model: transformers.PreTrainedModel, shape: Shape, folder: Path) -> None:
    if shape.layout == "one by one":
        model.save_pretrained(folder)
        assert not shape.extra
        return
    model.config.save_pretrained(folder)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in tensors), sorted(tensors)
    tensors.update((name, torch.ones(3)) for name in shape.extra)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [shape.architecture]
    (folder / "config.json").write_text(json.dumps(config))


def greedy(model: transformers.PreTrainedModel, ids: list[int],
           **shown: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens by prefill and cached decode steps, and the distribution after each token of prompt and output."""
    out = model(input_ids=torch.tensor([ids]), use_cache=True, **shown)
    rows, tokens = [out.logits[0]], []
    for _ in range(NEW_TOKENS):
        tokens.append(int(rows[-1][-1].argmax()))
        out = model(input_ids=torch.tensor([[tokens[-1]]]), past_key_values=out.past_key_values, use_cache=True)
        rows.append(out.logits[0])
    return tokens, torch.cat(rows).float().log_softmax(-1)


def forced(model: transformers.PreTrainedModel, ids: list[int], piece: int) -> torch.Tensor:
    """The distribution after each of `ids`, fed in pieces."""
    rows, cache = [], None
    for start in range(0, len(ids), piece):
        out = model(input_ids=torch.tensor([ids[start:start + piece]]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        rows.append(out.logits[0])
    return torch.cat(rows).float().log_softmax(-1)


def tiny(shape: Shape, out: Path) -> None:
    model = getattr(transformers, shape.architecture)(configuration(shape)).eval()
    randomise(model)
    save(model, shape, out / shape.name)
    found = {}
    for length in PROMPT_LENGTHS:
        tokens, logprobs = greedy(model, prompt(length, shape.words))
        found.update({f"tokens{length}": np.array(tokens), f"logprobs{length}": logprobs.numpy()})
    longest = prompt(max(PROMPT_LENGTHS), shape.words)
    found["spread"] = (forced(model, longest, len(longest)) - forced(model, longest, 1)).abs().max().numpy()
    if shape.vision is not None:
        found.update(with_pictures(model, shape, out / shape.name))
    np.savez(out / f"{shape.name}.npz", **found)


def with_pictures(model: transformers.PreTrainedModel, shape: Shape, folder: Path) -> dict[str, np.ndarray]:
    frames = shape.vision["temporal_patch_size"]
    values = [(torch.from_numpy(one).float() / 255 - 0.5) / 0.5 for one in pixels(shape.vision)]
    shown = {"pixel_values": torch.cat([one.unsqueeze(2).repeat(1, 1, frames, 1, 1).flatten(1) for one in values]),
             "image_grid_thw": torch.tensor([[1, h, w] for h, w in grids(shape.vision)])}
    ids, _ = picture_prompt()
    kinds = torch.tensor([[int(token == IMAGE_TOKEN) for token in ids]], dtype=torch.int32)
    tokens, logprobs = greedy(model, ids, mm_token_type_ids=kinds, **shown)
    half = type(model).from_pretrained(folder, dtype=torch.bfloat16).eval()
    towers = {"embeddings": model, "embeddings_bfloat16": half}
    found = {name: one.model.visual(shown["pixel_values"].to(one.dtype), grid_thw=shown["image_grid_thw"])
             .pooler_output.float().numpy() for name, one in towers.items()}
    model.set_attn_implementation("eager")
    again = model(input_ids=torch.tensor([ids]), mm_token_type_ids=kinds, **shown).logits[0].float().log_softmax(-1)
    apart = again - logprobs[:len(ids)]
    found["picture_spread"] = np.array([float(apart.abs().max()), float(apart.square().mean().sqrt())])
    return {**found, "picture_tokens": np.array(tokens), "picture_logprobs": logprobs.numpy()}


def bench_slice(folder: Path, out: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    model_class = getattr(transformers, config["architectures"][0])
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model, info = model_class.from_pretrained(folder, dtype=dtype, output_loading_info=True)
        assert not any(info.values()), info
        model.eval()
        for length in SLICE_LENGTHS:
            ids = prompt(length, config["vocab_size"])
            if dtype == torch.float32:
                tokens, logprobs = greedy(model, ids)
                found.update({f"tokens{length}": np.array(tokens), f"logprobs{length}": logprobs.numpy()})
            else:
                ids += found[f"tokens{length}"].tolist()
                name = str(dtype).removeprefix("torch.")
                found[f"{name}_{length}"] = forced(model, ids, len(ids)).numpy()
                found[f"{name}_chunked_{length}"] = forced(model, ids, PIECE).numpy()
        del model
    np.savez(out / "slice.npz", **found)


def main() -> None:
    out, slice_folder = Path(sys.argv[1]), Path(sys.argv[2])
    torch.manual_seed(0)
    with torch.no_grad():
        for shape in SHAPES:
            tiny(shape, out)
        bench_slice(slice_folder, out)


if __name__ == "__main__":
    main()
