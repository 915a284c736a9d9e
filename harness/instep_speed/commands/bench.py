"""`instep bench`: time every kind of work next to its floor and to kernels of other packages.

Leaves out: the measurement (`instep_speed.bench`), and comparing two versions (`instep gate`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from instep.cli.finish_with_result import Commit, Html, Json, finish, joins_alone, must_be_free
from instep.cli.subject_options import Given, takes_setting

from ..bench import KINDS

CHOICES = ", ".join(KINDS)


@takes_setting(
    several=("ops",),
    without=("state_dtype", "state_rounding", "kv_dtype", "layout", "snapshot_layout", "strategy", "conv", "drafter",
             "graphs", "overlap", "guarded"),
    ops="The op set that is measured; left out: triton on a card, plain on a CPU.",
    dtype="Activations; left out: bfloat16 on a card, float32 on a CPU.",
    device="cpu, cuda or cuda:1; left out: cuda where there is one.",
)  # fmt: skip
def bench(
    given: Given,
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
    html: Html = None,
    json: Json = None,
    join: Annotated[list[Path] | None, typer.Option(help="A result of another call to merge into --json or to plot; "
                                                         "may be repeated. The latest row of a cell counts, and "
                                                         "keeps its date, revision and machine.")] = None,
    commit: Commit = None,
) -> None:
    """Check every answer, then time it; exit 0: all right, 1: an answer of ours is wrong, 3: nothing was timed."""
    import os

    os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")  # self-tuning peers do it once per machine
    import torch

    from instep.atomic_write import is_replaced
    from instep.cli.progress import trial_runner
    from instep_reference.contract.errors import BadInput

    from ..bench import plots as pictures
    from ..bench import resume
    from ..bench.run import Asked, Bench
    from ..bench.run import bench as measure

    if grid not in ("default", "full"):
        raise BadInput("--grid", found=grid, expected="default or full")
    if grid == "full" and (json is None or not is_replaced(json)):
        raise BadInput("--grid", found="full without a file", expected="--json FILE as well, which keeps every cell")
    must_be_free((json, html), *join or ())
    there = [json] if json is not None and json.is_file() else []
    if join:
        more = kind or given.named or grid != "default" or peers is not None or at or minutes is not None
        joins_alone(join, "bench", "measures", json=json, plots=plots, html=html, with_options=bool(more))
        found = resume.joined(there + join, commit)
    else:
        card = torch.cuda.is_available() and given.named.get("device", "cuda") != "cpu"
        usual = {"device": "cuda" if card else "cpu", "dtype": "bfloat16" if card else "float32"}
        names = given.several("ops", "triton" if card else "plain")
        settings = {name: given.setting(**usual | {"ops": name}) for name in names}
        one = next(iter(settings.values()))
        asked = Asked(
            {name: setting.op_set() for name, setting in settings.items()}, one.device, one.activation,
            tuple(dict.fromkeys(kind)) if kind else tuple(KINDS),
            grid if one.device.startswith("cuda") else "tiny",  # type: ignore[arg-type]
            6.0 if minutes is None else minutes, card if peers is None else peers, commit, _axes(at or []),
        )
        found = resume.going_on(there[0], asked) if grid == "full" and there else Bench(asked)
    if plots is not None:
        pictures.ready(plots, found.asked.kinds, json, html, *join or ())
    if not join:
        with trial_runner("bench", found.asked.minutes, json, found.result) as run:
            measure(found.asked, run, found)
        found.ended = "since the call was interrupted" if run.interrupted else found.ended
    try:
        finish(found.result(), json, html=html)
    finally:  # files and table first, so that a failing plot loses neither
        if plots is not None:
            pictures.write(found, plots)


def _axes(told: list[str]) -> dict[str, tuple[str, ...]]:
    """Parse repeated AXIS=VALUE into axis -> values."""
    from instep_reference.contract.errors import BadInput

    found: dict[str, tuple[str, ...]] = {}
    for one in told:
        axis, equals, value = one.partition("=")
        if not (axis and equals and value):
            raise BadInput("--at", found=one, expected="AXIS=VALUE, as batch=8")
        found[axis] = (*found.get(axis, ()), value)
    return found
