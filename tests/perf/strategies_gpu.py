"""The commit strategies at real sizes on a GPU: one verify and its commit, per layer, and the bytes per request.

Leaves out: the rest of a model, and the gate. Run it as a script; `--json FILE --commit REVISION` keeps the figures.
First the states of every strategy after ten rounds are compared, bit by bit, with the one-token kernel's; a speed is
told only beside that.
Sizes: HV = 32, H = 16, K = V = 128, bf16 activations, fp32 state in `VK` layout; 3 of 4 tokens accepted a round.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from instep.report.command import typed
from instep_optimized import commit as strategies
from instep_optimized.batch import Who, windows
from instep_optimized.commit.base import AcceptedWindows
from instep_optimized.kernels.runtime import versions
from instep_optimized.layout import Address, Part
from instep_optimized.memory import Memory
from instep_optimized.memory.budget import Sizes, bytes_per, demands
from instep_optimized.ops.base import GdnInputs
from instep_optimized.ops.triton import TRITON
from instep_optimized.transfer.to_device import sent
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.engine import Capacity
from instep_reference.contract.place import Place
from support.checkpoints import config_of
from support.on_card import bytes_per_second, replays

LAYERS, WINDOW, ACCEPTED, BATCHES = 6, 4, 3, (1, 8, 32, 64)
ROUNDS, REPLAYS = 10, 60
TO, CUDA = Place("trunk", 0, "core"), torch.device("cuda")
CONFIG = ModelConfig.from_dict(config_of(
    "dense", num_hidden_layers=LAYERS, layer_types=["linear_attention"] * LAYERS, linear_num_key_heads=16,
    linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128, mtp_num_hidden_layers=0,
))
STATE = 4 * CONFIG.value_heads * CONFIG.key_dim * CONFIG.value_dim  # bytes of one request's state in one layer


@dataclass(frozen=True)
class Course:
    """One strategy with a batch of windows, and what its rows consume in every layer."""

    memory: Memory
    commit: strategies.CommitPair
    who: Who
    lens: torch.Tensor
    inputs: list[GdnInputs]
    x: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def of(cls, strategy: str, conv: str, batch: int) -> Course:
        pages = batch * 4
        room = Capacity(tuple(range(1, batch + 1)), tuple(range(1, pages + 1)), 64, batch * WINDOW)
        sizes = Sizes(TRITON.types(torch.bfloat16, torch.float32), "VK", room, WINDOW)
        wanted = demands(CONFIG, sizes) + strategies.demands(CONFIG, sizes, strategy, conv)
        memory = Memory(wanted, room, guarded=False, poison=None, device=CUDA)
        commit = strategies.make(CONFIG, sizes, memory, WINDOW, strategy, conv)
        for number in range(batch):
            memory.claim(str(number))
            memory.grow([(str(number), 200)])
            commit.claim(memory.slots.of(str(number)))
        numbers = range(batch)
        slots, rows, begin, count, lens = sent([
            [memory.slots.of(str(n)) for n in numbers], list(numbers), [n * WINDOW for n in numbers], [WINDOW] * batch,
            [ACCEPTED] * batch,
        ], CUDA)
        torch.manual_seed(0)
        tokens, (heads, keys, values) = batch * WINDOW, (CONFIG.value_heads, CONFIG.key_dim, CONFIG.value_dim)

        def drawn() -> GdnInputs:
            q, k = (torch.nn.functional.normalize(torch.randn(tokens, 16, keys, device=CUDA), dim=-1) for _ in range(2))
            log_decay = -torch.rand(tokens, heads, device=CUDA).pow(4) * 2
            v, beta = torch.randn(tokens, heads, values, device=CUDA), torch.rand(tokens, heads, device=CUDA)
            return GdnInputs(q * keys**-0.5, k, v, log_decay, beta)

        channels = 2 * 16 * keys + heads * values
        x = torch.randn(tokens, channels, device=CUDA, dtype=torch.bfloat16)
        weight = torch.randn(channels, 4, device=CUDA, dtype=torch.bfloat16)
        return cls(memory, commit, Who(slots, rows, begin, count), lens, [drawn() for _ in range(LAYERS)], x, weight)

    def round(self, layers: int = LAYERS, conv: bool = True) -> None:
        """Verify in so many layers, then commit three tokens of each window."""
        tokens = torch.zeros(len(self.x), dtype=torch.int64, device=CUDA)
        bound = self.commit.bind(TRITON, windows(TRITON, self.memory, self.who, tokens, "verify", WINDOW))
        for layer in range(layers):
            if conv:
                TRITON.conv(x=self.x, weight=self.weight, parts=bound.conv(layer), to=TO)
            TRITON.gdn(inputs=self.inputs[layer], parts=bound.state(layer), dtype=torch.bfloat16, to=TO)
        bound.ran(TRITON)
        before = TRITON.select(x=self.memory.slot_table.length, index=self.who.slots)
        self.commit.commit(TRITON, AcceptedWindows(self.who.rows, self.who.slots, self.lens - 1, self.lens, before))
        TRITON.advance(length=self.memory.slot_table.length, slots=self.who.slots, by=self.lens)


def check(course: Course) -> bool:
    """Whether all states after ten rounds are, bit by bit, what the one-token kernel makes of the accepted tokens."""
    slots = course.who.slots.tolist()
    states: list[torch.Tensor] = []
    for layer in range(LAYERS):
        lines = torch.zeros(len(slots), 32, 128, 128, device=CUDA).transpose(2, 3)
        units = torch.arange(len(slots), device=CUDA)
        here = Address(lines, units)
        fresh = torch.zeros(len(slots), dtype=torch.bool, device=CUDA)
        for _ in range(ROUNDS):
            for token in range(ACCEPTED):
                one = GdnInputs(*(x[token::WINDOW].contiguous() for x in course.inputs[layer]))
                part = Part("window", units, torch.ones_like(units), 1, here, fresh, store=here)
                TRITON.gdn(inputs=one, parts=(part,), dtype=torch.bfloat16, to=TO)
        states.append(lines)
    for _ in range(ROUNDS):
        course.round()
    length = int(course.memory.slot_table.length[slots[0]])
    for number, slot in enumerate(slots):
        _, held = course.commit.peek(TRITON, slot, length)
        if not all(torch.equal(held[layer], states[layer][number]) for layer in range(LAYERS)):
            return False
    return length == ROUNDS * ACCEPTED


def microseconds(work: Callable[[], None]) -> tuple[float, float]:
    """Median and half the interquartile range of a captured graph's replays."""
    quarter, median, three = statistics.quantiles((1e3 * time for time in replays(work, REPLAYS)), n=4)
    return median, (three - quarter) / 2


def beside(strategy: str, conv: str) -> dict[str, int]:
    """Bytes per request and layer: of slots, rings and rows, KV and the slot table excepted."""
    room = Capacity((1,), (1,), 64, WINDOW)
    sizes = Sizes(TRITON.types(torch.bfloat16, torch.float32), "VK", room, WINDOW)
    costs = bytes_per(strategies.demands(CONFIG, sizes, strategy, conv), guarded=False)
    return {kind: cost // LAYERS for kind, cost in costs.items()}


def main() -> None:
    speed = bytes_per_second()
    found: list[dict[str, Any]] = []
    print(f"moved {speed / 1e12:.2f} TB/s; one state {STATE / 2**20:.0f} MiB; us per layer, verify and commit together")
    for conv in strategies.CONV_FORMS:
        for strategy in strategies.STRATEGIES:
            if conv == "widened" and strategy != "rerun":
                continue  # the two forms are independent of each other: one pair shows the other form
            for batch in BATCHES:
                course = Course.of(strategy, conv, batch)
                exact = check(course)
                whole, spread = microseconds(course.round)
                states = microseconds(lambda course=course: course.round(conv=False))[0]  # type: ignore[misc]
                empty = microseconds(lambda course=course: course.round(0))[0]  # type: ignore[misc]
                alone = (states - empty) / LAYERS
                floor = 1e6 * 2 * STATE * batch / speed
                found.append({
                    "strategy": strategy, "conv": conv, "batch": batch, "window": WINDOW, "exact": exact,
                    "us_per_layer": (whole - empty) / LAYERS, "spread": spread / LAYERS, "state_us": alone,
                    "round_us": empty, "floor_us": floor, "bytes": beside(strategy, conv),
                })
                times = f"{(whole - empty) / LAYERS:8.1f}, states {alone:8.1f} ({alone / floor:4.2f} of 2 S)"
                told = f"{times}, once a round {empty:6.1f}" if exact else "WRONG: no speed"
                print(f"{strategy:10} {conv:8} B={batch:3}: exact {exact}, {told}", flush=True)
                del course
                torch.cuda.empty_cache()
    if "--json" in sys.argv:
        commit = sys.argv[sys.argv.index("--commit") + 1] if "--commit" in sys.argv else None
        date = datetime.now(UTC).isoformat(timespec="seconds")
        told = {"commit": commit, "command": typed(sys.argv), "date": date}
        sizes = {"bytes_per_s": speed, "layers": LAYERS, "state_bytes": STATE}
        result = {**told, "machine": versions(), **sizes, "rows": found}
        Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps(result, indent=1))
    if not all(row["exact"] for row in found) or not math.isfinite(speed):
        sys.exit(1)


if __name__ == "__main__":
    main()
