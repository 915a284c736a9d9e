"""`instep gate`: is AFTER slower than BEFORE? It refuses to time an arm that fails its checks.

Leaves out: the measurement (`instep_speed.gate`).
"""

import math
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from instep.atomic_write import folder_for
from instep.bundled import model
from instep.cli.finish_with_result import Files, writes
from instep.cli.progress import progress
from instep.cli.subject_options import Given, takes_setting
from instep.options import DRAFTER
from instep_reference.contract.errors import BadInput


@writes("json", "html", "commit")
@takes_setting(ops="The op set that a source tree runs.", drafter=DRAFTER)
def gate(
    given: Given,
    files: Files,
    before: Annotated[str, typer.Argument(help="Op set, module:attribute, or a source tree.")],
    after: Annotated[str | None, typer.Argument(help="The op set or source tree that may have become slower.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="draft, verify or commit; may be repeated. Default: "
                                                          "verify and commit, with a block drafter all three.")] = None,
    clock: Annotated[list[str] | None, typer.Option(help="wall, cpu or device: judge only these; may be repeated. "
                                                           "Left out: all.")] = None,
    pairs: Annotated[int, typer.Option(help="Minimum number of interleaved pairs, at least 60.")] = 60,
    allowed: Annotated[float, typer.Option(help="The allowed slow-down, as a fraction.")] = 0.03,
    checkpoint: Annotated[Path | None, typer.Option(
        "--model", "--checkpoint", help="The model to run; default: instep's.")] = None,
    batch: Annotated[int, typer.Option(help="Requests in a batch.")] = 4,
    rounds: Annotated[int, typer.Option(help="Rounds of the trace that is checked, then timed.")] = 2,
    num_steps: Annotated[int, typer.Option(help="Drafts a round: the window is one wider.", min=1)] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
    patience: Annotated[float, typer.Option(help="Seconds to wait for an answer of an arm.")] = 600.0,
    keep: Annotated[Path | None, typer.Option(help="A folder for the trace and the arms' logs.")] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Without AFTER: measure how often the gate is wrong "
                                                               "here, with A/A and a slow-down of about 8%.")] = False,
    minutes: Annotated[float, typer.Option(help="Sampling time of --calibrate.")] = 10.0,
    baselines: Annotated[Path | None, typer.Option(
        help="The folder of calibrations: --calibrate writes this machine's file there, other runs read it. Default: "
             "instep's own, which are only read.")] = None,
) -> None:
    """Time two arms in interleaved pairs; exit 0: held, 1: slower or refused, 3: too noisy to tell."""
    from instep_reference.contract.checkpoint import OnDisk
    from instep_reference.contract.drafters import BLOCK

    from ..gate import calibration_files, result_data
    from ..gate.cases import CASES, USUAL
    from ..gate.gate import gate as run
    from ..gate.input_and_result import Question
    from ..gate.power import measure
    from ..gate.process import Source

    if calibrate is (after is not None):
        found = "AFTER together with --calibrate" if calibrate else "no AFTER"
        raise BadInput("gate", found=found, expected="BEFORE AFTER, or BEFORE --calibrate")
    if not 0 < minutes < math.inf:
        raise BadInput("--minutes", found=minutes, expected="a number above 0")
    usual = CASES if given.named.get("drafter") == BLOCK else USUAL
    cases = tuple(dict.fromkeys(case or usual))
    question = Question(
        before, before if after is None else after, checkpoint or model(), cases, pairs, allowed, given.setting(),
        batch, rounds, num_steps, seed, patience, tuple(dict.fromkeys(clock or ())), tuple(given.named),
    )
    named = {"BEFORE": question.before, "AFTER": question.after}
    arms = [Source.of(said, question.setting.ops, name) for name, said in named.items()]
    ops = given.named.get("ops")
    if ops is not None and ops not in (before, after) and not any(arm.roots for arm in arms):
        expected = "a source tree that runs it; BEFORE and AFTER name op sets themselves"
        raise BadInput("--ops", found=f"{ops}, and no source tree", expected=expected)
    OnDisk.open(question.checkpoint)
    kept = baselines and calibrate and calibration_files.file_of(question, baselines)
    files.must_be_free(more=[kept or None])
    if baselines is not None and not baselines.is_dir():
        raise BadInput("--baselines", found=f"{baselines}: no such folder", expected="a folder of calibrations")
    with tempfile.TemporaryDirectory(prefix="instep-gate-") as aside, progress("gate") as said:
        folder = keep or Path(aside)
        folder_for(folder, "--keep")
        if calibrate:
            power = measure(question, folder, minutes, said)
            told = calibration_files.result(power, files.commit)
            if kept and not power.report.refused:
                told.write(kept)
            files.finish(told)
        report = run(question, folder, said)
    files.finish(result_data.of(report, baselines, files.commit))
