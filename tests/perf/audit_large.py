"""A random model in the shape of a real 4B one, and text that `transformers` generates with it, for `instep audit`.

    python tests/perf/audit_large.py draw qwen3.5-4b
    python tests/perf/audit_large.py generate qwen3.5-4b text.jsonl
    instep audit text.jsonl --model qwen3.5-4b --dtype float32 --json fixtures/results/audit-4b.json

The layers of `transformers` generate the text in fp32. They are loaded one after another, so that this needs no more
memory than the audit. Leaves out: speed; every token is a pass over all layers.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from perf.random_model_on_disk import draw

PROMPTS, LENGTH, TOKENS = 2, 24, 4
VOCAB_BLOCK = 16384


class Model:
    """The files of a checkpoint, and the configuration as transformers reads it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.where: dict[str, str] = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
        self.config = Qwen3_5TextConfig(**json.loads((directory / "config.json").read_text()))
        self.config._attn_implementation = "sdpa"

    def read(self, name: str, rows: Any = slice(None)) -> torch.Tensor:
        with safe_open(self.directory / self.where[name], framework="pt") as opened:
            found: torch.Tensor = opened.get_slice(name)[rows].float()
        return found

    def layer(self, index: int) -> Any:
        with torch.device("meta"):
            made = modeling.Qwen3_5DecoderLayer(self.config, index)
        prefix = f"model.layers.{index}."
        state = {name.removeprefix(prefix): self.read(name) for name in self.where if name.startswith(prefix)}
        made.load_state_dict(state, assign=True)
        return made.eval()


@torch.no_grad()
def following(model: Model, texts: torch.Tensor) -> torch.Tensor:
    """The argmax after each text. Shapes: texts [B, T] -> [B]."""
    embedding, config = "model.embed_tokens.weight", model.config
    known = {token: model.read(embedding, slice(token, token + 1)) for token in set(texts.flatten().tolist())}
    hidden = torch.stack([torch.cat([known[token] for token in text]) for text in texts.tolist()])
    at = torch.arange(texts.shape[1])[None].expand(len(texts), -1)
    turned = modeling.Qwen3_5TextRotaryEmbedding(config)(hidden, at)
    for index in range(config.num_hidden_layers):
        hidden = model.layer(index)(hidden, position_embeddings=turned)
    norm = modeling.Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
    norm.weight.copy_(model.read("model.norm.weight"))
    rows = norm(hidden[:, -1])
    blocks = range(0, config.vocab_size, VOCAB_BLOCK)
    return torch.cat([rows @ model.read(embedding, slice(at, at + VOCAB_BLOCK)).T for at in blocks], 1).argmax(-1)


def generate(directory: Path, out: Path) -> None:
    model = Model(directory)
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(1, model.config.vocab_size, (PROMPTS, LENGTH), generator=generator)
    for _ in range(TOKENS):
        texts = torch.cat([texts, following(model, texts)[:, None]], 1)
    out.write_text("".join(
        json.dumps({"prompt": text[:LENGTH], "tokens": text[LENGTH:]}) + "\n" for text in texts.tolist()
    ))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["draw", shape]:
            draw(shape, Path(shape))
        case ["generate", directory, out]:
            generate(Path(directory), Path(out))
        case _:
            sys.exit(__doc__)
