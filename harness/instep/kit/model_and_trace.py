"""A model and a trace in memory, which a test replays without files.

`small()` is designed for kernels: K differs from V, and two value heads share a key head, so a transposed state or a
wrong head is visible. Leaves out: the replay (`replayed_trace.py`), and drawn workloads (`hypothesis_strategies.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.config import ModelConfig

from ..campaign.shapes.random_weights import random_checkpoint
from ..run.build_compared_engines import Plan, reference
from ..run.engine_without_comparison import header_of
from ..setting import Setting
from ..trace.event_scheduler import drive, recorded
from ..trace.event_text import told
from ..trace.file import Trace, write
from ..trace.header import Model, Recording, Room
from ..trace.policy import Arrival, Policy, ScheduledAction, Steps
from .argument_checks import must_be, must_be_known, must_be_several

# Names are Hugging Face's. Two layers: one of the gated delta rule and one of attention; and a draft head.
CONFIG: Mapping[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 64, "hidden_size": 32,
    "num_hidden_layers": 2, "full_attention_interval": 2, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": False, "max_position_embeddings": 4096, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "intermediate_size": 48,
}
PROMPTS: Mapping[str, tuple[int, ...]] = {"one": (7,), "few": (1, 2, 3, 4, 5), "more": tuple(range(20))}
ROOM = Room(slots=(3, 1), pages=(5, 2, 7, 1, 4, 6, 3, 8), page_size=8, max_tokens=32)
# Every kind of event, and few of each: a prompt in chunks, ragged acceptance, a step count that falls to 0 and rises to
# 3, a preemption, a saved state that another request begins with, an abort before its commit, a slot used again.
POLICY = Policy(
    name="small", claim="Three requests share two slots.", capacity=ROOM, num_steps=1,
    adaptive={"candidate_steps": [1, 3]}, accept=(0, 1), steps=(Steps(2, 0), Steps(3, 3)),
    arrivals=(
        Arrival("a", "few", chunks=(3,), max_new=4), Arrival("b", "one", max_new=4),
        Arrival("c", "few", arrive=1, max_new=5),
    ),
    deeds=(
        ScheduledAction(1, "save", "a", name="start"), ScheduledAction(2, "preempt", "b"),
        ScheduledAction(2, "load", "c", name="start"), ScheduledAction(3, "resume", "b"), ScheduledAction(2, "idle"),
        ScheduledAction(5, "abort", "c", when="verified"),
    ),
)


@dataclass(frozen=True, repr=False)
class Workload:
    """A trace, and the model that it was recorded with. config: the fields of the model's `config.json`."""

    trace: Trace
    checkpoint: Checkpoint
    config: Mapping[str, Any]

    def __repr__(self) -> str:
        """Describe a failing example: the numbers that differ from `small()`, and the events."""
        numbers = [f"{name}={value!r}" for name, value in self.config.items() if CONFIG.get(name) != value]
        events = [f"  {index} {kind}  {text}".rstrip() for index, kind, text in told(self.trace)]
        return "\n".join([f"<Workload {self.trace.header.name}: small({', '.join(numbers)}), of events", *events, ">"])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the text above. Without this method Hypothesis prints the fields of the dataclass."""
        printer.text(repr(self))

    def write(self, folder: Path) -> Path:
        """Write both -> the trace, for `instep replay`. The model goes into `folder/model`."""
        model = folder / "model"
        write_model(self.checkpoint, self.config, model)
        opened, header = Checkpoint.open(model), self.trace.header
        header = msgspec.structs.replace(header, checkpoint=Model.of(opened, model, "model"))
        path = folder / f"{header.name}.jsonl"
        write(path, header, self.trace.events, self.trace.recorded)
        return path


def small(policy: Policy = POLICY, prompts: Mapping[str, tuple[int, ...]] = PROMPTS, **config: Any) -> Workload:
    """Record a policy with a random model on the reference. config: other numbers for the model (`CONFIG`)."""
    must_be("policy", policy, Policy, "a Policy")
    must_be("prompts", prompts, Mapping, "a dict of lists of tokens, by name")
    for name, tokens in prompts.items():
        must_be_several(f"prompts[{name!r}]", tokens, int, "a list of tokens")
    return recorded_with(model_of(**config), policy, prompts)


@cache
def _drawn(config: bytes) -> tuple[Checkpoint, dict[str, Any]]:
    data: dict[str, Any] = msgspec.json.decode(config)
    return random_checkpoint(ModelConfig.from_dict(data), dtype=torch.float32), data


def model_of(**config: Any) -> tuple[Checkpoint, dict[str, Any]]:
    """A random model, and its `config.json`. A number that the model does not use is refused."""
    read = _Read({**CONFIG, **config})
    ModelConfig.from_dict(read)
    must_be_known(config, {*CONFIG, *read.names}, "the model", ("policy", "prompts", "events"))
    return _drawn(msgspec.json.encode({**CONFIG, **config}))


class _Read(dict[str, Any]):
    """Fields of a file. names: the fields that were read."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.names = set[str]()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def recorded_with(
    model: tuple[Checkpoint, Mapping[str, Any]], policy: Policy, prompts: Mapping[str, tuple[int, ...]]
) -> Workload:
    """Run the policy on the reference, and return the recorded workload."""
    checkpoint, config = model
    header, _ = header_of(policy, checkpoint, recording=Recording())
    plan = Plan.of(header, checkpoint, Setting(dtype="float64"), "policy")
    steps = list(drive(policy, prompts, header, reference(plan, torch.float64)))
    trace = Trace(Path(f"{policy.name}.jsonl"), header, tuple(step.event for step in steps), recorded(steps), "")
    return Workload(trace, checkpoint, config)


def write_model(checkpoint: Checkpoint, config: Mapping[str, Any], folder: Path) -> None:
    """A model directory, as everybody reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    save_file(dict(checkpoint.tensors), folder / "model.safetensors", {"format": "pt"})
