"""Hardware counters per kernel, which show the bottleneck of rounds and of slow cells of the benchmark.

Leaves out: speed. The profiler runs every kernel alone and several times, with a cold cache. So no kernel overlaps
another one here, and times are longer than in a round. A script for a machine with a GPU and NVIDIA's `ncu`:
    python tests/perf/counters_gpu.py --out fixtures/results/counters-native.txt --commit REVISION
It calls itself below the profiler. A round is that of `instep bench --kind rounds`, of a model of fewer layers. A cell
is one of `instep bench`, once through the layers of its arms; of windows with the round's index ops.
"""

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import triton

from instep.atomic_write import write_atomically
from instep.campaign.shapes import shape
from instep.campaign.shapes.random_weights import random_checkpoint
from instep.player import Player
from instep.run.engine_without_comparison import engine
from instep.setting import Setting
from instep_optimized.ops.triton import TRITON
from instep_reference.contract.engine import Draft
from instep_speed import bench
from instep_speed.bench.bench_types import Ground
from instep_speed.bench.bench_types import key as bench_key
from instep_speed.bench.interleaved_timing import Rates
from instep_speed.bench.kinds import rounds

TIME, READ = "gpu__time_duration.sum", "dram__bytes_read.sum"
COUNTERS = {  # heading -> what part of what the device can do at most, in percent of the kernel's whole time
    "memory": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "L2": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "L1": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "issue": "sm__inst_issued.avg.pct_of_peak_sustained_elapsed",
}
ALIKE = 8e6  # bytes: two launches of a kernel read the same weight if their reads differ by at most this
LEAST = 0.5  # percent of the time of all kernels: a kernel that takes less has no line
SETTLED = 2  # rounds, or turns of a cell, before the one that is looked at
PAST = 100e6  # bytes that a turn of a cell walks through at least
CELLS: tuple[tuple[str, dict[str, object], str], ...] = (  # kind, axes, and what the names of its arms end in
    ("strategies", {"batch": 8, "window": 4, "heads": 32, "state": "float32"}, "rerun"),
    ("strategies", {"batch": 64, "window": 4, "heads": 32, "state": "float32"}, "rerun"),
    ("strategies", {"batch": 128, "window": 4, "heads": 32, "state": "float32"}, "rerun"),
    ("decode", {"batch": 32, "heads": 32, "state": "float32"}, ""),
    ("attend", {"batch": 1, "rows": 2048, "behind": 0}, ""),
    ("attend", {"batch": 32, "rows": 4, "behind": 4096}, ""),
    ("attend", {"batch": 1, "rows": 4, "behind": 4096}, ""),
    ("attend", {"batch": 32, "rows": 4, "behind": 4096, "kv": "float8_e4m3fn"}, ""),
    ("attend", {"batch": 8, "rows": 8, "behind": 4096, "tree": "binary"}, ""),
)


def one_round(batch: int, layers: int) -> None:
    """Serve rounds without graphs, and let the profiler look at the last one."""
    model = shape(rounds.SHAPE, layers=layers)
    checkpoint = random_checkpoint(model, device=torch.device("cuda"), dtype=torch.bfloat16)
    trace = rounds.laid(checkpoint, batch, SETTLED + 1)
    setting = Setting.of(ops="triton", device="cuda", dtype="bfloat16", graphs=False, overlap=True)
    header = trace.header
    player = Player("profiled", engine(checkpoint, setting, header.room(), num_steps=header.num_steps))
    last = [number for number, event in enumerate(trace.events) if isinstance(event, Draft)][-1]
    for event in trace.events[:last]:
        player.serve(event)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    for event in trace.events[last:]:
        player.serve(event)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def one_turn(kind: str, at: dict[str, object], ends: str) -> None:
    """The same with a cell: every arm of ours once, whose name ends so"""
    device = torch.device("cuda")
    ground = Ground(device, torch.bfloat16, {"triton": TRITON}, Rates(4e12, 4e12, 8e14), int(PAST), peers=False)
    for arm in bench.kind(kind).make(ground, at).arms:
        if arm.work is not None and arm.name.endswith(ends):
            for _ in range(SETTLED):
                arm.work()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
            arm.work()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def counted(*asked: str) -> str:
    """The profiler's output for this program with these arguments: a line per kernel and counter"""
    ncu = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    metrics = ",".join((TIME, READ, *COUNTERS.values()))
    with tempfile.NamedTemporaryFile(suffix=".csv") as log:
        subprocess.run(
            [ncu, "--profile-from-start", "off", "--clock-control", "none", "--metrics", metrics,
             "--csv", "--print-units", "base", "--log-file", log.name,
             sys.executable, __file__, *asked],
            check=True,
        )  # fmt: skip
        return Path(log.name).read_text()


def lines_of(text: str) -> Iterable[str]:
    """A line per kernel, grid and weight, the longest in all first: how often, and medians"""
    launches: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(text[text.index('"ID"') :].splitlines()):
        at = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"].split("(")[0], "grid": row["Grid Size"]})
        at[row["Metric Name"]] = row["Metric Value"].replace(",", "")
    alike: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for launch in launches.values():
        kernel, grid = launch.pop("kernel"), launch.pop("grid").replace(" ", "")
        alike[kernel, grid].append({metric: float(value) for metric, value in launch.items()})
    groups = [(name, found) for name, all_of_it in alike.items() for found in _by_weight(all_of_it)]
    took = [sum(one[TIME] for one in found) for _, found in groups]
    heads = "".join(f" {name:>6}" for name in COUNTERS)
    yield f"{'kernel':40} {'grid':>13} {'launches':>8} {'us':>7} {'MB':>6}{heads}"
    for whole, (name, found) in sorted(zip(took, groups, strict=True), key=lambda one: -one[0]):
        if whole >= sum(took) * LEAST / 100:
            middle = {metric: median(one[metric] for one in found) for metric in (TIME, READ, *COUNTERS.values())}
            parts = "".join(f" {middle[metric]:6.0f}" for metric in COUNTERS.values())
            yield (f"{name[0][:40]:40} {name[1]:>13} {len(found):8} {middle[TIME] / 1e3:7.1f}"
                   f" {middle[READ] / 1e6:6.0f}{parts}")  # fmt: skip


def _by_weight(launches: list[dict[str, float]]) -> list[list[dict[str, float]]]:
    """Launches of a kernel, apart where what they read is"""
    rising = sorted(launches, key=lambda one: one[READ])
    found = [rising[:1]]
    for before, one in pairwise(rising):
        if one[READ] - before[READ] > ALIKE:
            found.append([])
        found[-1].append(one)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--only", choices=["rounds", "cells"], help="both, without it")
    parser.add_argument("--round", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.round is not None:
        return one_round(asked.round, asked.layers)
    if asked.cell is not None:
        return one_turn(*json.loads(asked.cell))
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    found = [f"# {where}, commit {asked.commit}, {datetime.now(UTC).date()}: ncu, rounds of {asked.layers} layers",
             "# each kernel alone, with a cold cache; MB read; counters in percent of the most"]  # fmt: skip
    works = [] if asked.only == "cells" else [
        (f"a round of {batch} requests", ("--round", str(batch), "--layers", str(asked.layers)))
        for batch in asked.batch
    ]  # fmt: skip
    works += [] if asked.only == "rounds" else [
        (f"{kind}, {bench_key(at)}", ("--cell", json.dumps([kind, at, ends]))) for kind, at, ends in CELLS
    ]  # fmt: skip
    for name, words in works:
        found += ["", name, *lines_of(counted(*words))]
        print("\n".join(found[-30:]), flush=True)
        if asked.out:
            write_atomically({asked.out: ("\n".join(found) + "\n").encode()})


if __name__ == "__main__":
    main()
