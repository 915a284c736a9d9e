"""A model in the shape of a real one with random weights, drawn to disk: one file per layer, one tensor at a time.

Leaves out: what the weights are (`random_weights.py`); those of a layer are the same here and in memory.
"""

import json
import re
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import save_file

from instep.campaign.shapes import FOLDER, NAMES
from instep.campaign.shapes.random_weights import drawn
from instep_reference.contract.checkpoint import INDEX
from instep_reference.contract.checkpoint_tensor_shapes import FUSED, expected_shapes
from instep_reference.contract.config import ModelConfig, read_json
from instep_reference.contract.errors import BadInput

TIED = 0.02  # scale of tied embeddings: at 1 every row would say the token that it was given
EMBEDDING = "model.embed_tokens.weight"
LAYER = re.compile(r"(model|mtp)\.layers\.(\d+)\.")


def draw(name: str, directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the checkpoint of that shape into a new directory."""
    if name not in NAMES:
        raise BadInput("shape", found=name, expected=f"one of {', '.join(NAMES)}")
    data = read_json(FOLDER / f"{name}.json")
    config = ModelConfig.from_dict(data)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(data, indent=1))
    where: dict[str, str] = {}
    for part, names in groupby(expected_shapes(config, stored=FUSED).items(), key=lambda item: _part(item[0])):
        tensors = {one: drawn(config, one, size, seed, torch.device("cpu"), dtype) for one, size in names}
        if config.tied and EMBEDDING in tensors:
            tensors[EMBEDDING].mul_(TIED)
        file = f"{part}-{len(where)}.safetensors"
        save_file(tensors, directory / file, {"format": "pt"})
        where |= dict.fromkeys(tensors, file)
    (directory / INDEX).write_text(json.dumps({"weight_map": where}, indent=1))
    return directory


def _part(name: str) -> str:
    found = LAYER.match(name)
    return f"{found[1]}-layer-{found[2]}" if found else name.partition(".")[0]
