"""`instep calibrate`: check that correct engines are not accused, and find the smallest detectable error.

Leaves out: the runs (`instep_proof.calibrate`).
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated

import typer

from instep.cli.farm_options import Farming, takes_farm
from instep.cli.finish_with_result import Files, writes
from instep.cli.progress import trial_runner
from instep.cli.subject_options import Given, takes_setting
from instep.report.document import Document, Kind, Listing
from instep_reference.contract.errors import BadInput

if TYPE_CHECKING:
    from ..calibrate.long_runs import LongRuns
    from ..calibrate.tables import Calibration


MOST_PARTS = 25  # trials of --farm with injected errors, or one per scene if there are more of them


@writes("json", "commit")
@takes_farm()
@takes_setting(
    several=("ops",),
    without=("dtype", "state_dtype", "state_rounding", "kv_dtype", "kept_dtype", "chunk_dtype", "ring_dtype", "layout",
             "snapshot_layout", "strategy", "conv", "drafter", "graphs", "prompt_graphs", "overlap", "guarded"),
    ops="One more op set that is right, as triton.",
)  # fmt: skip
def calibrate(
    given: Given,
    files: Files,
    farm: Farming,
    variants: Annotated[int, typer.Option(help="Correct engines, no two alike.", min=0)] = 200,
    runs: Annotated[int, typer.Option(help="Runs per size of an injected error; 0: none.", min=0)] = 3,
    long: Annotated[int, typer.Option(help="Long runs of correct engines, for errors to one side.", min=0)] = 0,
    part: Annotated[str | None, typer.Option(help="One part of several, as 3/16: some variants, some errors.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Time limit in seconds, in equal parts.", min=1.0)] = None,
) -> None:
    """Make the tables; exit 0: no correct engine was called wrong, 1: one was, 3: nothing was compared.

    The bound of a rate assumes independent blocks; those of one engine are not quite, so it is a guide, not a proof.
    """
    from instep.report.result import Result, read

    from ..calibrate import calibrate as run_all
    from ..calibrate.allowance_use import A_SCENE
    from ..calibrate.tables import Calibration, joined

    if not variants and not runs and not long:
        raise BadInput("--variants, --runs and --long", found="0 of all", expected="at least one of either")
    for name in given.several("ops"):
        given.setting(ops=name).op_set()
    files.must_be_free()
    machines: dict[str, object] = {}
    found, minutes = Calibration(given.setting().device), None if seconds is None else seconds / 60
    if farm.farm is not None:
        parts = max(math.ceil(max(variants, long) / A_SCENE), MOST_PARTS if runs else 1)
        trials = [{"part": f"{number}/{parts}"} for number in range(1, parts + 1)]
        served = farm.serve(lambda: trials, varied=("part",), total=parts, minutes=minutes)
        found, interrupted = joined(found.device, map(read, served.paths)), not served.complete
        machines = {"machines": served.machines}
    else:
        with trial_runner("calibrate", minutes) as run:
            run_all(found, variants, run, op_sets=given.several("ops"), runs=runs, long=long, part=_part(part))
        interrupted = run.interrupted
    alarms = [
        f"false alarm: {one['form']} {one['number']}, {one['check']}, event {one['event']}, {one['place']}: "
        f"{one['diagnosis']}" for one in (*found.alarms, *(found.long.alarms if found.long else ()))
    ]
    tables = [_rates(found)] if found.ran else []
    tables += [_limits(found)] if found.limits else []
    tables += [_slips(found.long)] if found.long else []
    told = Document("Calibration", found.exit, (), messages=alarms, tables=tables)
    result = Result(found.exit, found.device, found.as_data() | machines, files.commit)
    files.finish(result, told, interrupted=interrupted)


def _part(typed: str | None) -> tuple[int, int]:
    asked = re.fullmatch("([0-9]{1,4})/([0-9]{1,4})", typed or "1/1")
    number, parts = map(int, asked.groups()) if asked else (0, 0)
    if not 1 <= number <= parts:
        raise BadInput("--part", found=typed, expected="a part and how many there are, as 3/16")
    return number, parts


def _rates(result: Calibration) -> Listing:
    from ..calibrate.tables import by_tier

    heads: dict[str, Kind] = {
        "tier": "word", "blocks": "number", "undecided": "number", "alarms": "number",
        "upper bound of the rate (95%)": "number", "used": "number", "by": "text",
    }  # fmt: skip
    return Listing(heads, [
        (rate.tier, f"{rate.blocks:,}", f"{rate.undecided:,}", str(rate.alarms), f"{rate.bound:.1e}",
         f"{rate.worst:.2f}" if rate.worst else "exact", rate.by) for rate in by_tier(result.table())
    ], f"{len(result.ran)} correct engines; the rate is that of false alarms per block")  # fmt: skip


def _slips(long: LongRuns) -> Listing:
    from ..calibrate.long_runs import SLIPS

    heads: dict[str, Kind] = {"place": "word", "groups": "number", **dict.fromkeys((f"{s:g}" for s in SLIPS), "number")}
    return Listing(heads, [
        (component, str(groups), *(f"{each / groups:.0%}" for each in found))
        for component, (groups, *found) in long.found.items()
    ], f"{len(long.ran)} correct engines in long runs, {len(long.alarms)} accused, {long.used:.2f} of a limit used; at "
       f"which part of the heads and channels a slip of that size would be found in fp32")  # fmt: skip


def _limits(result: Calibration) -> Listing:
    tiers = list(result.limits[0].found)
    heads: dict[str, Kind] = {
        "place": "word", "activations": "word", **dict.fromkeys(("error when correct", *tiers), "number"),
    }  # fmt: skip
    return Listing(heads, [
        (limit.place, limit.storage, f"{limit.correct:.1e}",
         *("" if (size := limit.found[tier]) is None else f"{size:.0e}" for tier in tiers)) for limit in result.limits
    ], "the smallest injected error that is found in every run")  # fmt: skip
