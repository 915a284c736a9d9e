"""`instep op`: check single ops on small cases against their contract and the reference.

Leaves out: the cases and the comparison (`instep.kit`).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from instep_reference.contract.errors import BadInput

from ..report.document import Document, Kind, Listing, short
from ..verdict import Exit
from .finish_with_result import Files, writes
from .progress import progress
from .subject_options import Given, takes_setting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..kit.cases import Case
    from ..kit.listed_cases import Served
    from ..kit.strictest_rounding_declaration import Suggested
    from ..setting import Setting


@writes("json", "sarif", "annotate", "commit")
@takes_setting(
    without=("ops", "state_rounding", "kv_dtype", "kept_dtype", "chunk_dtype", "ring_dtype", "layout",
             "snapshot_layout", "strategy", "conv", "drafter", "graphs", "prompt_graphs", "overlap", "guarded"),
    dtype="Only cases of these activations: float32 or bfloat16; left out: both.",
    state_dtype="Only cases of states that are stored so: float32 or bfloat16.",
)
def op(
    given: Given,
    files: Files,
    ops: Annotated[str, typer.Argument(help="Op set or module:attribute.", metavar="OPS")],
    name: Annotated[list[str] | None, typer.Argument(help="Ops: gdn, conv, attend, ...; default: all with "
                                                         "cases.", metavar="OP")] = None,
    case: Annotated[str | None, typer.Option(help="Run only the case with this name.")] = None,
    drawn: Annotated[int, typer.Option(help="Number of additional random cases of gdn, conv and attend.",
                                       min=0)] = 20,
    seed: Annotated[int, typer.Option(help="The number of the first random case.", min=0)] = 0,
    real: Annotated[bool, typer.Option("--real", help="Cases of gdn, conv and attend in the sizes of a 9B model "
                                                      "instead.")] = False,
    suggest_rounding: Annotated[bool, typer.Option(
        "--suggest-rounding", help="Print the strictest declaration of rounded products with which the ops agree.",
    )] = False,
) -> None:
    """Check single ops on their contract and the reference; exit 0: all agree, 1: divergence, 3: nothing compared."""
    from ..kit.listed_cases import op_cases, served
    from ..report.result import Result

    files.must_be_free()
    setting = given.setting(ops=ops)
    widths = {field: given.named[field] for field in ("dtype", "state_dtype") if field in given.named}
    if case is not None and len(name or ()) != 1:
        raise BadInput("--case", found=f"{len(name or ())} ops", expected="the one op that has the case")
    if suggest_rounding and (files.sarif is not None or files.annotate):
        raise BadInput("--suggest-rounding", found="--sarif or --annotate", expected="neither: it has no findings")
    every: list[str | None] = [*name] if name else [None]
    cases = [
        some for one in every
        for some in op_cases(one, case=case, drawn=drawn, seed=seed, trees=True, real=real, **widths)
    ]
    if suggest_rounding:
        _suggest(setting, cases, {"ops": ops, "seed": seed}, files, named=bool(name))
    with progress(f"cases of {setting.name}") as advance:
        run = served(cases, setting.name, device=setting.device,
                     progress=lambda number: advance(str(cases[number]), number, len(cases)))
    found = {"ops": ops, "seed": seed, "runs": [_data(run)]}
    files.finish(Result(run.exit, setting.device, found, files.commit))


def _suggest(
    setting: Setting, cases: Sequence[Case], asked: dict[str, object], files: Files, *, named: bool,
) -> NoReturn:
    """Print the suggestion and end. Without names of ops: for the ops that multiply."""
    from dataclasses import asdict

    from ..kit.strictest_rounding_declaration import FORMS, suggested
    from ..report.result import Result

    cases = [case for case in cases if named or case.op in FORMS]
    with progress(f"declarations of {setting.name}") as advance:
        found = suggested(setting.op_set(), cases, setting.device,
                          lambda number: advance(str(cases[number]), number, len(cases)))  # fmt: skip
    forms = [{**asdict(one), "line": one.line} for one in found.forms]
    data = {**asked, "line": found.line, "suggested": forms}
    files.finish(Result(found.exit, setting.device, data, files.commit), _suggestion(found))


def _suggestion(found: Suggested) -> Document:
    """Per form the declaration, with the evidence for it and against the next stricter one; then the line to write."""
    from ..kit.strictest_rounding_declaration import written

    heads: dict[str, Kind] = {
        "form": "word", "declared": "text", "numbers": "number", "error": "number", "allowed": "number", "": "word",
    }  # fmt: skip
    rows = [
        (one.form, "nothing" if tried.product is None else written(tried.product), short(tried.elements),
         f"{tried.worst:.2e}", f"{tried.allowed:.2e}", "DIVERGES" if tried.failed else "agrees")
        for one in found.forms for tried in filter(None, (one.stricter, one.chosen))
    ]  # fmt: skip
    notes = [f"{one.form}: nothing is suggested: {one.why}" for one in found.forms if one.chosen is None]
    notes += dict.fromkeys(f"not served: {skip.reason}" for skip in found.verdict.skipped)
    said = [f"Add to the op set: {found.line}"] * bool(found.line)
    said += ["Write the block of your kernel: short cases do not show it"] * ("gdn.chunk" in found.products)
    said += ["AGREES: nothing has to be declared"] * (not found.line and found.exit is Exit.AGREED)
    return Document("declared products", found.exit, said, tables=[Listing(heads, rows, "declared products")],
                    notes=notes)  # fmt: skip


def _data(run: Served) -> dict[str, object]:
    from ..report.outcome_data import finding, listed, most_used

    names = dict.fromkeys(case.op for case in run.cases)
    by_op = {name: [c for c in run.verdict.compared if run.cases[c.event].op == name] for name in names}
    unserved = Counter(run.cases[skip.event].op for skip in run.verdict.skipped)
    return {
        "exit": int(run.exit), "cases": [str(case) for case in run.cases], "elements": run.verdict.elements,
        "by_op": [{"op": name, "cases": sum(case.op == name for case in run.cases), "not_served": unserved[name],
                   "elements": sum(c.elements for c in compared), "used": most_used(compared)}
                  for name, compared in by_op.items()],
        "skipped": [{"case": skip.where, "says": skip.reason} for skip in run.verdict.skipped],
        **listed(run.verdict.findings, lambda found: {
            **finding(found), "where": run.where(found), "case": str(run.cases[found.event])}),
        "message": run.message or None,
    }
