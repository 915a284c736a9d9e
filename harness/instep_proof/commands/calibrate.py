"""`instep calibrate`: check that correct engines are not accused, and find the smallest detectable error.

Leaves out: the runs (`instep_proof.calibrate`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from instep.cli.finish import Commit, Json
from instep.cli.setting import Given, takes_setting

if TYPE_CHECKING:
    from rich.table import Table

    from ..calibrate import Calibration


@takes_setting(
    several=("ops",),
    without=("dtype", "state_dtype", "state_rounding", "kv_dtype", "layout", "snapshot_layout", "strategy", "conv",
             "drafter", "graphs", "overlap", "guarded"),
    ops="One more op set that is right, as triton.",
)  # fmt: skip
def calibrate(
    given: Given,
    variants: Annotated[int, typer.Option(help="Correct engines, no two alike.", min=0)] = 200,
    runs: Annotated[int, typer.Option(help="Runs per size of an injected error; 0: none.", min=0)] = 3,
    seconds: Annotated[float | None, typer.Option(help="Time limit in seconds, half for each table.", min=1.0)] = None,
    json: Json = None,
    commit: Commit = None,
) -> None:
    """Make both tables; exit 0: no correct engine was called wrong, 1: one was, 3: nothing was compared.

    The bound of a rate assumes independent blocks; those of one engine are not quite, so it is a guide, not a proof.
    """
    from rich.console import Console

    from instep.atomic_write import writable
    from instep.cli.progress import progress
    from instep.report import tables
    from instep.report.result import Result
    from instep.verdict import Exit
    from instep_reference.contract.errors import BadInput

    from .. import calibrate as calibration

    if not variants and not runs:
        raise BadInput("--variants and --runs", found="0 of both", expected="at least one of either")
    device = given.setting().device
    for name in given.several("ops"):
        given.setting(ops=name).op_set()
    if json is not None:
        writable(json)
    shown = Console()
    with progress("calibrate") as advance:
        result = calibration.calibrate(
            variants, device=device, op_sets=given.several("ops"), seconds=seconds, runs=runs, advance=advance
        )
    code = Exit.DIVERGED if result.alarms else Exit.AGREED if result.ran or result.limits else Exit.INCONCLUSIVE
    if json is not None:
        Result(code, result.device, result.as_data(), commit).write(json)
    if result.ran:
        tables.show(_rates(result), shown)
    for variant, alarm in result.alarms:
        said = f"{variant.form} {variant.number}, {alarm.check}, event {alarm.event}, {alarm.place}: {alarm.diagnosis}"
        tables.say(shown, f"false alarm: {said}")
    if result.limits:
        tables.show(_limits(result), shown)
    raise typer.Exit(int(code))


def _rates(result: Calibration) -> Table:
    from instep.report.tables import table

    from ..calibrate.tables import by_tier

    made = table(f"{len(result.ran)} correct engines; the rate is that of false alarms per block", {
        "tier": "word", "blocks": "number", "undecided": "number", "alarms": "number",
        "upper bound of the rate (95%)": "number", "used": "number", "by": "text",
    })
    for rate in by_tier(result.table()):
        made.add_row(
            rate.tier, f"{rate.blocks:,}", f"{rate.undecided:,}", str(rate.alarms),
            f"{rate.bound:.1e}", f"{rate.worst:.2f}" if rate.worst else "exact", rate.by,
        )
    return made


def _limits(result: Calibration) -> Table:
    from instep.report.tables import Kind, table

    tiers = list(result.limits[0].found)
    numbers: dict[str, Kind] = {name: "number" for name in ("error when correct", *tiers)}
    made = table("the smallest injected error that is found in every run", {
        "place": "word", "activations": "word", **numbers,
    })
    for limit in result.limits:
        sizes = ("" if limit.found[tier] is None else f"{limit.found[tier]:.0e}" for tier in tiers)
        made.add_row(limit.error, limit.storage, f"{limit.correct:.1e}", *sizes)
    return made
