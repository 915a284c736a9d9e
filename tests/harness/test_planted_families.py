"""A drawn fault of each family is found, located and named as `fixtures/results/faults.json` records it.

The draw is another one whenever the source of instep changes, so a sentence that is lost anywhere is soon missed here.
Leaves out: whole campaigns (`instep faults`), and faults that need a relation or a copy of the source.
"""

from pathlib import Path
from random import Random

import pytest

from instep.report.result import read
from instep.run.replay import served
from instep_proof.faults.catalogue import FAMILIES
from instep_proof.faults.result_data import data_of, surprises
from support.running.covering import few
from support.running.planting import judged_here, plantable

RECORDED = Path(__file__).resolve().parents[2] / "fixtures" / "results" / "faults.json"
JUDGED = ("found", "located", "named", "named_by")
# Its error is of numbers near the smallest of fp32, whose exponentials differ between machines; so does its name.
BY_MACHINE = "gate-exp-of-running-sums"
HERE = [family for family in FAMILIES if family != "readings"]  # each fault of `readings` needs a relation


@few(10)
@pytest.mark.slow
@pytest.mark.parametrize("family", HERE)
def test_drawn_fault_is_found_located_and_named_as_recorded(family: str) -> None:
    draw = Random("".join(served().values()))
    faults = draw.sample(FAMILIES[family], len(FAMILIES[family]))
    fault = next(fault for fault in faults if plantable(fault) and fault.id != BY_MACHINE)
    (recorded,) = (row for row in read(RECORDED)["results"] if row["id"] == fault.id)
    now = data_of(judged_here(fault))
    assert [now[name] for name in JUDGED] == [recorded[name] for name in JUDGED], list(surprises(now))
