"""Layers of real shape on a GPU with our kernels and with FLA's: T0, T1 and T2d after every commit, and how far apart.

Leaves out: speed. Run it as a script on a machine with a GPU where fla-core and einops are installed:
    python tests/perf/fla_gpu.py --out fixtures/results/fla-native.json --commit REVISION
The widths of a 9B model (HV = 32) and of a 27B one (HV = 48), K = V = 128, one GDN layer and the draft head; bf16
weights drawn at random, fp32 states. Both op sets see the same rows, so what the states differ by is the kernels'. With
`--narrow --device cpu` it runs anywhere.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from instep.atomic_write import write_atomically
from instep.campaign.shapes import shape
from instep.campaign.shapes.random_weights import random_checkpoint
from instep.campaign.shapes.run_real_shape import course
from instep.diagnose import explain_outcome
from instep.report import outcome_data
from instep.report.divergence_message import where
from instep.report.machine import installed
from instep.run.large_model import outcome
from instep.run.replay import Outcome
from instep.setting import Setting
from instep.verdict import Comparison, Tier
from instep.watch.event_context import EventContext
from instep_reference.contract.config import ModelConfig

SHAPES = ("qwen3.5-9b", "qwen3.5-27b")
OPS = ("triton", "fla")
STRATEGIES = ("rerun", "snapshot")  # windows in one launch, and a launch per row
VOCAB = 8192  # of the shape's own: embedding and head are not what is looked at
PEERS = ("fla-core", "flash-linear-attention", "einops")

States = dict[tuple[int, str], torch.Tensor]


class Kept:
    """Looks at nothing: keeps the first layer's state of every request after every event."""

    name, tier = "kept", Tier.DIRECTED

    def __init__(self) -> None:
        self.states: States = {}

    def __call__(self, context: EventContext) -> Iterator[Comparison]:
        for request, state in context.subject.after.items():
            if state.length:
                self.states[context.index, request] = state.state[0]
        return iter(())


def main(argv: list[str]) -> int:
    told = _parsed(argv)
    ran: list[tuple[Outcome, States]] = []
    for name in told.shape or SHAPES:
        checkpoint = random_checkpoint(_config(name, told), device=told.device)
        label = f"{name}, {'narrow, ' * told.narrow}{told.layers} {'layer' if told.layers == 1 else 'layers'}"
        trace = course(checkpoint, label, rounds=told.rounds)
        for strategy in told.strategy or STRATEGIES:
            for ops in told.ops or OPS:
                kept = Kept()
                setting = Setting(ops, told.device, told.dtype, strategy=strategy)
                ran.append((explain_outcome(outcome(trace, checkpoint, setting, also=(kept,))), kept.states))
                _say(ran[-1][0])
    outcomes = [found for found, _ in ran]
    apart = [_apart(ran, number) for number in range(len(ran))]
    for one in filter(None, apart):
        print("{name} {strategy}: {ops} from {from}: {worst:.1e} at worst of {states} states".format(**one))
    if told.out is not None:
        result = outcome_data.of(outcomes, told.commit).data() | {
            "peers": {name: installed(name) for name in PEERS},
            "float32_products": os.environ.get("TRITON_F32_DEFAULT", "tf32"),
            "apart": list(filter(None, apart)),
        }
        write_atomically({told.out: msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n"})
    return int(outcome_data.worst(outcomes))


def _apart(ran: list[tuple[Outcome, States]], number: int) -> dict[str, Any] | None:
    """How far a run's states are from those of the first run of the same shape and strategy, by head, relatively."""
    found, states = ran[number]
    first, others = next(
        other for other in ran
        if (other[0].name, other[0].plan.setting.strategy) == (found.name, found.plan.setting.strategy)
    )
    if first is found:
        return None
    away = [
        float(((ours - theirs).flatten(1).norm(dim=1) / ours.flatten(1).norm(dim=1)).max())
        for ours, theirs in ((others[key].double(), states[key].double()) for key in sorted(states.keys() & others))
    ]
    return {
        "name": found.name, "strategy": found.plan.setting.strategy, "ops": found.plan.setting.ops,
        "from": first.plan.setting.ops,
        "states": len(away), "worst": max(away), "median": statistics.median(away),
    }


def _say(found: Outcome) -> None:
    verdict = found.verdict
    directed = [one for one in verdict.compared if one.check == "directed"]
    worst = max((one.worst for one in directed), default=float("nan"))
    print(
        f"{found.name} {found.plan.setting.ops} {found.plan.setting.strategy}: {verdict.exit.name}, {verdict.events} "
        f"of {found.of} events, {len(directed)} states in {sum(one.blocks for one in directed)} blocks, "
        f"projection {worst:.3f}, "
        f"{verdict.elements:,} numbers, {found.seconds['subject']:.1f} s",
        flush=True,
    )
    for one in verdict.findings[:1]:
        print(f"  {where(one)}: {one.diagnosis} ({one.worst:.4g}, limit {one.allowed:.4g})")


def _config(name: str, told: argparse.Namespace) -> ModelConfig:
    if not told.narrow:
        return shape(name, layers=told.layers, vocab=told.vocab)
    from support.inputs.narrow_models import narrow

    return narrow(name, layers=told.layers, vocab=64)


def _parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--shape", action="append", choices=SHAPES)
    parser.add_argument("--ops", action="append")
    parser.add_argument("--strategy", action="append")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--vocab", type=int, default=VOCAB)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--narrow", action="store_true", help="a few channels and heads: to see that it runs")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
