"""`instep fixtures`: write a trained model, traces and an example suite to a folder, or the model for another engine.

Leaves out: their source (`instep.bundled`).
"""

import json
import shlex
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from instep_reference.contract.errors import BadInput

from ..atomic_write import folder_for, write_atomically
from ..bundled import CARRIED
from ..bundled import fixtures as carried

# Token numbers of images in a configuration for SGLang, which serves this architecture with a vision part only. They
# are bytes that no UTF-8 text has.
IMAGE, VIDEO, VISION_START, VISION_END = 250, 251, 252, 253
SMALLEST_VISION = {
    "model_type": "qwen3_5", "depth": 1, "hidden_size": 128, "intermediate_size": 128, "num_heads": 2, "in_channels": 3,
    "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16,
    "deepstack_visual_indexes": [], "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip


class Engine(Enum):
    SGLANG = "sglang"
    VLLM = "vllm"
    VLLM_CPU = "vllm-cpu"


def fixtures(
    folder: Annotated[Path, typer.Argument(help="A new folder, or an empty one.", metavar="DIR")],
    engine: Annotated[Engine | None, typer.Option("--for", help="Write only the trained model, as this engine loads "
                                                               "it.")] = None,
) -> None:
    """Write a small trained model, traces and an example suite, to start from."""
    from rich.console import Console

    from ..report.terminal_tables import say

    try:
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise BadInput("DIR", found=f"{folder}: {error.strerror}", expected="a folder that can be read") from None
    if taken:
        raise BadInput("DIR", found=f"{folder}, where something is", expected="a new folder, or an empty one")
    source, files = carried(), dict[Path, bytes]()
    if engine is not None:
        tiny = source / "tiny"
        files = {folder / "config.json": config_for(engine, json.loads((tiny / "config.json").read_text())),
                 folder / "model.safetensors": (tiny / "model.safetensors").read_bytes()}  # fmt: skip
        if engine is Engine.VLLM_CPU:
            weights = folder / "model.safetensors"
            files[weights] = with_wider_keys(files[weights], json.loads((tiny / "config.json").read_text()))
    for name in CARRIED if engine is None else ():
        inside = sorted((source / name).rglob("*")) if (source / name).is_dir() else [source / name]
        for file in inside:
            if file.is_file() and "__pycache__" not in file.parts:
                place = file.relative_to(source)
                if place.parts[0] == "example":  # the suite is at the top, where pytest runs
                    place = place.relative_to("example")
                files[folder / place] = file.read_bytes()
    for parent in sorted({file.parent for file in files}):
        folder_for(parent, "DIR")
    write_atomically(files)
    console, typed = Console(), shlex.quote(str(folder))
    if engine is not None:
        say(console, f"the trained model for {engine.value} in {folder}. It has no tokenizer: start the engine with "
                     "skip_tokenizer_init, and give prompts as token numbers, one per byte")  # fmt: skip
        return
    say(console, f"{len(files)} files in {folder}. Then:")
    say(console, f"  cd {typed} && pytest                        # the example suite: mine.py in two traces")
    say(console, f"  instep replay {typed}/traces/adaptive.jsonl --ops plain")


def config_for(engine: Engine, text: dict[str, Any]) -> bytes:
    """The `config.json` with which an engine loads the text model.

    SGLang (0.5.12 to 0.5.23) loads the weights as `Qwen3_5ForConditionalGeneration` alone: the text model is nested,
    and it needs a vision part, which stays uninitialised. Its class of the text model has experts unless their number
    is 0.
    vLLM (0.27 to 0.33, `Qwen3_5ForCausalLM`) takes the text model. It clears the sections of rotary positions in the
    model's config and not in the drafter's, whose rotary kernel then gets positions in three rows (with 0.32.0 on a CPU
    it writes outside of its tensors), so there are none here. On a CPU keys and values must have one width.
    """
    if engine is Engine.SGLANG:
        stated = {name: value for name, value in text.items() if value is not None and name != "architectures"}
        text = {
            "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
            "text_config": {**stated, "num_experts": 0, "torch_dtype": text["dtype"]},
            "vision_config": {**SMALLEST_VISION, "out_hidden_size": text["hidden_size"]},
            "tie_word_embeddings": text["tie_word_embeddings"], "eos_token_id": text["eos_token_id"],
            "dtype": text["dtype"], "torch_dtype": text["dtype"], "image_token_id": IMAGE, "video_token_id": VIDEO,
            "vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END,
        }
    else:
        rope = {name: value for name, value in text["rope_parameters"].items() if not name.startswith("mrope")}
        width = text["linear_value_head_dim" if engine is Engine.VLLM_CPU else "linear_key_head_dim"]
        text = {**text, "rope_parameters": rope, "linear_key_head_dim": width}
    return json.dumps(text, indent=1).encode() + b"\n"


def with_wider_keys(weights: bytes, text: dict[str, Any]) -> bytes:
    """The checkpoint with zeros in queries and keys, so that their heads are as wide as those of values.

    The states have the same numbers, and zeros. Queries have another scale, which the norm after the delta rule removes
    but for its epsilon, so logits change a little.
    """
    from safetensors.torch import load, save
    from torch import cat
    from torch.nn.functional import pad

    heads, keys, values = (text[f"linear_{name}"] for name in ("num_key_heads", "key_head_dim", "value_head_dim"))
    found = load(weights)
    for name, tensor in found.items():
        if name.endswith(("linear_attn.in_proj_qkv.weight", "linear_attn.conv1d.weight")):
            rest = tensor.shape[1:]
            narrow = tensor[: 2 * heads * keys].reshape(2 * heads, keys, -1)
            wide = pad(narrow, (0, 0, 0, values - keys)).reshape(2 * heads * values, *rest)
            found[name] = cat([wide, tensor[2 * heads * keys :]])
    return save(found, {"format": "pt"})
