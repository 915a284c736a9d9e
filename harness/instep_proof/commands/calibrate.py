"""`instep calibrate`: check that correct engines are not accused, and find the smallest detectable error.

Leaves out: the runs (`instep_proof.calibrate`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from instep.cli.finish_with_result import Commit, Json, finish, must_be_free
from instep.cli.subject_options import Given, takes_setting

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..calibrate.tables import Calibration


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
    from instep.cli.progress import trial_runner
    from instep.report.result import Result
    from instep_reference.contract.errors import BadInput

    from ..calibrate import calibrate as run_all
    from ..calibrate.tables import Calibration

    if not variants and not runs:
        raise BadInput("--variants and --runs", found="0 of both", expected="at least one of either")
    for name in given.several("ops"):
        given.setting(ops=name).op_set()
    must_be_free((json,))
    found = Calibration(given.setting().device)
    with trial_runner("calibrate", None if seconds is None else seconds / 60) as run:
        run_all(found, variants, run, op_sets=given.several("ops"), runs=runs)
    finish(Result(found.exit, found.device, found.as_data(), commit), json, lambda console: _show(found, console),
           interrupted=run.interrupted)  # fmt: skip


def _show(found: Calibration, console: Console) -> None:
    from instep.report import terminal_tables

    if found.ran:
        terminal_tables.show(_rates(found), console)
    for variant, alarm in found.alarms:
        said = f"{variant.form} {variant.number}, {alarm.check}, event {alarm.event}, {alarm.place}: {alarm.diagnosis}"
        terminal_tables.say(console, f"false alarm: {said}")
    if found.limits:
        terminal_tables.show(_limits(found), console)


def _rates(result: Calibration) -> Table:
    from instep.report.terminal_tables import table

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
    from instep.report.document import Kind
    from instep.report.terminal_tables import table

    tiers = list(result.limits[0].found)
    numbers: dict[str, Kind] = {name: "number" for name in ("error when correct", *tiers)}
    made = table("the smallest injected error that is found in every run", {
        "place": "word", "activations": "word", **numbers,
    })
    for limit in result.limits:
        sizes = ("" if limit.found[tier] is None else f"{limit.found[tier]:.0e}" for tier in tiers)
        made.add_row(limit.place, limit.storage, f"{limit.correct:.1e}", *sizes)
    return made
