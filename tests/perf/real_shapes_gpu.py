"""Models in real shapes on a GPU, a few layers each: T0, T1 and T2d of every GDN layer after every event of a course.

Leaves out: speed (`instep bench`). Run it as a script on a machine with a GPU:
    python tests/perf/real_shapes_gpu.py --out fixtures/results/shapes-native.json --commit REVISION
bf16 weights drawn at random, bf16 activations, fp32 states; the fp64 pieces run on the GPU too.
"""

import argparse
import gc
import sys
import time
from pathlib import Path

import torch

from instep.campaign.shapes import NAMES
from instep.campaign.shapes.run_real_shape import LAYERS, shaped
from instep.report import outcome_data
from instep.report.divergence_message import where
from instep.run.replay import Outcome
from instep.setting import Setting


def main(argv: list[str]) -> int:
    told = _parsed(argv)
    outcomes = []
    for name in told.shape or NAMES:
        for strategy in told.strategy or [None]:
            setting = Setting.of(
                ops=told.ops, device=told.device, dtype="bfloat16", layout=told.layout, strategy=strategy,
                conv=told.conv,
            )
            outcomes.append(ran(name, setting, told.layers, told.vocab))
            gc.collect()
            if told.device.startswith("cuda"):
                torch.cuda.empty_cache()
    if told.out is not None:
        outcome_data.of(outcomes, told.commit).write(told.out)
    return int(outcome_data.worst(outcomes))


def ran(name: str, setting: Setting, layers: int, vocab: int | None) -> Outcome:
    """One shape through the course, and a line about it."""
    begun = time.perf_counter()
    found = shaped(name, setting, layers=layers, vocab=vocab)
    verdict, seconds = found.verdict, time.perf_counter() - begun
    directed = [one for one in verdict.compared if one.check == "directed"]
    worst = max((one.worst for one in directed), default=float("nan"))
    states = f"{len(directed)} states in {sum(one.blocks for one in directed)} blocks, projection {worst:.3f}"
    print(
        f"{name} {found.plan.setting.strategy}: {verdict.exit.name}, {verdict.events} of {found.of} events, {states}, "
        f"{verdict.elements:,} numbers, {seconds:.1f} s",
        flush=True,
    )
    for one in verdict.findings[:1]:
        print(f"  {where(one)}: {one.diagnosis} ({one.worst:.4g}, limit {one.allowed:.4g})")
    return found


def _parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--shape", action="append", choices=NAMES)
    parser.add_argument("--strategy", action="append")
    parser.add_argument("--conv")
    parser.add_argument("--ops", default="triton")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layout", default="VK")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--vocab", type=int, help="fewer tokens than the shape has")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
