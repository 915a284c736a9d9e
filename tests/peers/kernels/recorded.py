"""Record traces for kernels of KDA and Mamba2: `python -m peers.kernels.recorded FOLDER`.

The committed traces of these have heads of 8, and no prompt with more tokens than a kernel takes at once. Here the
policies of `fixtures/traces` drive small random models with heads as wide as a tile of the kernels, and one more policy
has prompts of 150, 70 and 17 tokens. In a row, `{unpacked}/traces/kimi-wider.jsonl` is the policy `wider` with the
model `kimi`. The steps dt of the model `nemotron` are at least 0.3: the kernels compute dt as log(1 + exp(x)), which
has few correct digits where dt is small. Leaves out: the entries that use them.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import softplus

from instep.cli.record import make
from instep.setting import Setting
from instep.trace.header import Room
from instep.trace.policy import Arrival, Policy, read_policy, read_prompts
from support.inputs.checkpoints import Kind, write

TOP = Path(__file__).resolve().parents[3]
TRACES = TOP / "fixtures" / "traces"
FOLDER = "traces"  # in the folder of the unpacked wheels
POLICIES = ("faults/wider", "faults/ragged", "faults/kept", "faults/mixed", "faults/steps", "peers/lengths")
STRIDE = 37  # between the drafts of a window; no divisor of the vocabulary
MODELS: dict[Kind, dict[str, Any]] = {
    "kimi": {"num_hidden_layers": 2, "linear_attn_config": {
        "kda_layers": [1], "full_attn_layers": [2], "num_heads": 2, "head_dim": 32}},
    "ling": {"num_hidden_layers": 2, "layer_group_size": 2, "head_dim": 32, "num_attention_heads": 2,
             "num_key_value_heads": 2, "num_nextn_predict_layers": 0},
    "nemotron": {"hybrid_override_pattern": "M*", "ssm_state_size": 32, "mamba_num_heads": 4, "mamba_head_dim": 16},
}  # fmt: skip
LONG = Policy(
    name="prompts", claim="Prompts of several chunks of 64 tokens, of one, and of a block of 16 and one token.",
    capacity=Room(slots=(3, 1, 2), pages=tuple(range(40, 0, -1)), page_size=8, max_tokens=200), num_steps=1,
    arrivals=(Arrival("a", "150", chunks=(66, 84), max_new=4), Arrival("b", "70", max_new=4),
              Arrival("c", "17", arrive=1, max_new=4)), accept=(1, 0), rounds=3,
)  # fmt: skip


def propose(tokens: Sequence[int], count: int) -> list[int]:
    """Drafts that depend on the last token alone."""
    return [(tokens[-1] + STRIDE * (n + 1)) % 256 for n in range(count)]


def lengthen_steps(model: Path) -> None:
    """Raise the steps dt of Mamba2 to 0.3 to 0.9, and lower the rates, so that a state forgets as slowly as before."""
    tensors = load_file(model / "model.safetensors")
    for name in [name for name in tensors if name.endswith("mixer.dt_bias")]:
        rate, before = name.replace("dt_bias", "A_log"), softplus(tensors[name])
        steps = torch.linspace(0.3, 0.9, len(before))
        tensors[name] = steps.expm1().log()
        tensors[rate] = tensors[rate] + (before / steps).log()
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


def record(folder: Path, kinds: Sequence[Kind] = tuple(MODELS)) -> None:
    """The models and their traces, in `folder`. A trace that is there is kept."""
    prompts = {**read_prompts(TOP / "fixtures/tiny/prompts.json"), **read_prompts(TRACES / "faults/short.prompts.json"),
               **{str(length): tuple((7 * n * n + 3 * n + length) % 256 for n in range(length))
                  for length in (150, 70, 17)}}  # fmt: skip
    policies = [*(read_policy(TRACES / f"{name}.policy.json") for name in POLICIES), LONG]
    for kind in kinds:
        model = folder / f"{kind}-model"
        if not model.exists():
            lengthen_steps(write(model, kind, dtype=torch.bfloat16, vocab_size=256, **MODELS[kind]))
        for policy in policies:
            place = folder / f"{kind}-{policy.name}.jsonl"
            if not place.exists():
                external = Setting(dtype="float64", drafter="peers.kernels.recorded:propose")
                make(model, prompts, policy, place, external)


if __name__ == "__main__":
    record(Path(sys.argv[1]))
