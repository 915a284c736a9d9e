"""`instep bench`: time every kind of work next to its floor and to kernels of other packages.

Leaves out: the measurement (`instep_speed.bench`), and comparing two versions (`instep gate`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from instep.atomic_write import folder_for, is_replaced, writable, write_atomically
from instep.cli.finish_with_result import Files, joins_alone, writes
from instep.cli.progress import trial_runner
from instep.cli.subject_options import Given, takes_setting
from instep_reference.contract.errors import BadInput

from ..bench import KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..bench.run import Row

CHOICES = ", ".join(KINDS)


@writes("json", "html", "commit")
@takes_setting(
    several=("ops",),
    without=("state_dtype", "state_rounding", "kv_dtype", "kept_dtype", "chunk_dtype", "ring_dtype", "layout",
             "snapshot_layout", "strategy", "conv", "graphs", "prompt_graphs", "overlap", "guarded"),
    ops="The op set that is measured; left out: triton on a card, plain on a CPU.",
    dtype="Activations; left out: bfloat16 on a card, float32 on a CPU.",
    device="cpu, cuda or cuda:1; left out: cuda where there is one.",
    drafter="Only cells with this drafter, as block: the same as --at drafter=block.",
    also=("ranks",),
    ranks="Only whole rounds, on one rank and on this many: each a process, with a card (NCCL), or on a CPU (gloo).",
)  # fmt: skip
def bench(
    given: Given,
    files: Files,
    kind: Annotated[list[str] | None, typer.Option(help=f"{CHOICES}; may be repeated. Default: all.")] = None,
    grid: Annotated[str, typer.Option(help="default, or full, which continues from its --json file. Both write the "
                                           "file after every cell. On a CPU shapes are tiny.")] = "default",
    minutes: Annotated[float | None, typer.Option(help="Time limit, shared by the kinds; default 6. Cells that do not "
                                                       "fit are listed.")] = None,
    at: Annotated[list[str] | None, typer.Option(metavar="AXIS=VALUE", help="Only cells with this value, as batch=8 or "
                                                 "state=bfloat16; may be repeated. Default: all.")] = None,
    peers: Annotated[bool | None, typer.Option("--peers/--no-peers", help="Also time kernels of other packages; "
                                                                         "default on a card.")] = None,
    plots: Annotated[Path | None, typer.Option(help="A folder for SVG plots.")] = None,
    join: Annotated[list[Path] | None, typer.Option(help="A result of another call to merge into --json or to plot; "
                                                         "may be repeated. The latest row of a cell counts, and "
                                                         "keeps its date, revision and machine.")] = None,
) -> None:
    """Check every answer, then time it; exit 0: all right, 1: an answer of ours is wrong, 3: nothing was timed."""
    import os

    os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")  # self-tuning peers do it once per machine
    import torch

    from ..bench import resume
    from ..bench.run import Asked, Bench
    from ..bench.run import bench as measure

    if grid not in ("default", "full"):
        raise BadInput("--grid", found=grid, expected="default or full")
    if grid == "full" and (files.json is None or not is_replaced(files.json)):
        raise BadInput("--grid", found="full without a file", expected="--json FILE as well, which keeps every cell")
    ranks = int(given.named.get("ranks", 1))
    if ranks > 1 and kind not in (None, ["rounds"]):
        raise BadInput("--ranks", found=f"{ranks} with --kind {' --kind '.join(kind)}", expected="--kind rounds alone")
    if "drafter" in given.named:
        at = [*(at or ()), f"drafter={given.named['drafter']}"]
    files.must_be_free(*join or ())
    there = [files.json] if files.json is not None and files.json.is_file() else []
    if join:
        more = kind or given.named or grid != "default" or peers is not None or at or minutes is not None
        joins_alone(join, "bench", "measures", json=files.json, plots=plots, html=files.html, with_options=bool(more))
        found = resume.joined(there + join, files.commit)
    else:
        card = torch.cuda.is_available() and given.named.get("device", "cuda") != "cpu"
        usual = {"device": "cuda" if card else "cpu", "dtype": "bfloat16" if card else "float32"}
        usual |= {"comm": "nccl" if card else "gloo"} if ranks > 1 else {}
        names = given.several("ops", "triton" if card else "plain")
        settings = {name: given.setting(**usual | {"ops": name}) for name in names}  # cells choose their drafters
        one = next(iter(settings.values()))
        asked = Asked(
            {name: setting.op_set() for name, setting in settings.items()}, one.device, one.activation,
            tuple(dict.fromkeys(kind)) if kind else ("rounds",) if ranks > 1 else tuple(KINDS),
            grid if one.device.startswith("cuda") else "tiny",  # type: ignore[arg-type]
            6.0 if minutes is None else minutes, card if peers is None else peers, files.commit, _axes(at or []), ranks,
        )
        found = resume.going_on(there[0], asked) if grid == "full" and there else Bench(asked)
    if plots is not None:
        _must_be_writable(plots, found.asked.kinds, files.json, files.html, *join or ())
    if not join:
        with trial_runner("bench", found.asked.minutes, files.json, found.result) as run:
            measure(found.asked, run, found)
        found.ended = "since the call was interrupted" if run.interrupted else found.ended
    try:
        files.finish(found.result())
    finally:  # files and table first, so that a failing plot loses neither
        if plots is not None:
            draw(found.rows, plots)


def _must_be_writable(folder: Path, kinds: Sequence[str], *others: Path | None) -> None:
    """Make the folder, or refuse it, before anything is measured. others: files that the command reads or writes."""
    folder_for(folder, "--plots")
    for name in kinds:
        for file in {folder / f"{name}.svg", *folder.glob(f"{name}-*.svg")}:
            writable(file, *others)


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write one file for every plot and return their paths."""
    from instep.report.svg import picture

    from ..bench.result_document import pictures

    folder_for(folder, "--plots")
    files = {folder / f"{'-'.join(re.findall('[a-zA-Z0-9]+', plot['title']))}.svg": picture(plot)
             for plot in pictures(rows)}  # fmt: skip
    if files:
        write_atomically(files)
    return list(files)


def _axes(told: list[str]) -> dict[str, tuple[str, ...]]:
    """Parse repeated AXIS=VALUE into axis -> values."""
    found: dict[str, tuple[str, ...]] = {}
    for one in told:
        axis, equals, value = one.partition("=")
        if not (axis and equals and value):
            raise BadInput("--at", found=one, expected="AXIS=VALUE, as batch=8")
        found[axis] = (*found.get(axis, ()), value)
    return found
