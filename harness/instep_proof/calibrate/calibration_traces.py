"""The models and traces of calibration: small random models, and short forced traces with the triggers of faults.

A scene depends only on its number; no file is read. Leaves out: running it (`allowance_use.py`, `graded_errors.py`).
"""

from dataclasses import dataclass, replace

from msgspec import structs

from instep.campaign.shapes import shape
from instep.campaign.shapes.random_weights import random_checkpoint
from instep.run.build_compared_engines import Plan
from instep.run.large_model import forced_trace
from instep.setting import Setting
from instep.trace.file import Trace
from instep.trace.header import Room
from instep.trace.policy import Arrival, Policy, Steps
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.config import ModelConfig

VOCAB, PAGE_SIZE, WINDOW = 64, 4, 4
# Two GDN layers around one attention layer: so errors pass through both kinds.
COMMON = {
    "hidden": 32, "intermediate": 48, "heads": 2, "kv_heads": 1,
    "head_dim": 16, "rotary_dim": 4, "mtp_layers": 1, "vocab": VOCAB,
}
# r = HV / H of 1, 2 and 3; K under, over and equal to V; V no multiple of the 8 columns of a block.
GDN = (
    {"key_heads": 1, "value_heads": 2, "key_dim": 16, "value_dim": 24},
    {"key_heads": 2, "value_heads": 2, "key_dim": 32, "value_dim": 16},
    {"key_heads": 1, "value_heads": 3, "key_dim": 16, "value_dim": 20},
)
# Every fourth model has experts in the place of its dense MLP.
EXPERTS = {
    "experts": 6, "experts_per_token": 2, "expert_intermediate": 24, "shared_intermediate": 16, "norm_topk": True,
    "intermediate": 0,
}
ROOM = Room((5, 1, 3), tuple(range(60, 0, -1)), PAGE_SIZE, 64)
# In every fourth scene windows are trees, of another shape for each request.
NODES, TREES = 6, (((0, 0, 1, 2), (0, 0, 1, 2, 4)),)
PROMPTS = (11, 3, 5)  # tokens of each request
CHUNKS: tuple[tuple[int, ...], ...] = ((), (1, 10), (5, 6), (4, 3, 4), (9, 2), (2, 2, 7), (10, 1), (3,))
ROUNDS = 4
ACCEPT = ((2, 0), (3, 1), (0, 3), (1, 2))


@dataclass(frozen=True)
class Scene:
    """A model and a trace for it, in which every choice is forced."""

    name: str
    checkpoint: Checkpoint
    trace: Trace

    def plan(self, setting: Setting) -> Plan:
        return Plan.of(self.trace.header, self.checkpoint, setting, self.name)


def scene(number: int, rounds: int = ROUNDS) -> Scene:
    """The scene of that number. Models, chunk sizes and accepted counts have different periods, so all combine."""
    chunks, accept = CHUNKS[number % len(CHUNKS)], ACCEPT[number // 2 % len(ACCEPT)]
    checkpoint = random_checkpoint(config(number), seed=number)
    name = f"scene {number}"
    policy = _policy(name, chunks, accept, rounds)
    if trees(number):  # a tree has as many steps in every round
        room = structs.replace(policy.capacity, num_draft_tokens=NODES)
        policy = structs.replace(policy, capacity=room, num_steps=WINDOW - 1, adaptive=None, steps=(), trees=TREES)
    lengths = {f"p{request}": length for request, length in enumerate(PROMPTS)}
    return Scene(name, checkpoint, forced_trace(policy, checkpoint, lengths, number))


def trees(number: int) -> bool:
    """Whether the windows of that scene are trees."""
    return number % 4 == 2


def config(number: int) -> ModelConfig:
    whole, experts = shape("qwen3.5-9b"), EXPERTS if number % 4 == 3 else {}
    around, between = (whole.mixers[layers[0]] for layers in (whole.recurrent, whole.attending))
    layers = tuple((mixer, "moe" if experts else "mlp") for mixer in (around, between, around))
    return replace(whole, layers=layers, **{**COMMON, **GDN[number % len(GDN)], **experts})  # type: ignore[arg-type]


def _policy(name: str, chunks: tuple[int, ...], accept: tuple[int, ...], rounds: int) -> Policy:
    """Two requests, a third one in the second round, a step without drafts, and a longer window."""
    most = max(30, rounds * (WINDOW + 1))  # tokens of a request
    room = ROOM if rounds == ROUNDS else structs.replace(ROOM, pages=tuple(range(3 * (most + max(PROMPTS)), 0, -1)))
    arrivals = (
        Arrival("a", "p0", chunks=chunks, max_new=most), Arrival("b", "p1", max_new=most),
        Arrival("c", "p2", arrive=1, chunks=(2,), max_new=most),
    )  # fmt: skip
    return Policy(
        name, "Correct engines differ, and none is called wrong.", room,
        arrivals, num_steps=1, adaptive={"candidate_steps": [1, WINDOW - 1]}, steps=(Steps(1, WINDOW - 1),),
        accept=accept, plain=(2,), rounds=rounds,
    )
