"""Features of pytest that users rely on: last failures first, ids, reruns, workers, informative summaries.

Leaves out: what the plugin collects and prints (`test_plugin.py`).
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from support.running.command import Ran
from support.running.covering import WHOLE

from .test_plugin import home as home
from .test_plugin import session

pytestmark = pytest.mark.slow
BAD = "support.wrong.kit_ops:FORGETFUL"
TRACES = ("--instep-traces=traces", "--instep-ops=ledger", f"--instep-ops={BAD}")
OWN = '''
import pytest
from hypothesis import Phase, given, settings
from instep import kit
from support.wrong.kit_ops import FORGETFUL, PLAIN

@pytest.mark.parametrize("case", kit.op_cases("gdn", case="decode-r1-KV-float32"), ids=str)
@pytest.mark.parametrize("ops", [PLAIN, FORGETFUL], ids=["right", "wrong"])
def test_case(case, ops):
    kit.served(case, ops).must_agree()

@settings(max_examples=1, phases=[Phase.generate], database=None, derandomize=True)
@given(work=kit.traces(), case=kit.configurations())
def test_drawn(work, case):
    raise kit.Divergence("DIVERGED  drawn")
'''
WRONG = "test_own.py::test_case[wrong-gdn-decode-r1-KV-float32]"
# A plugin for reruns: it runs the same item again, and reports its last run.
AGAIN = '''
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item, nextitem):
    runtestprotocol(item, nextitem=nextitem, log=False)
    item._initrequest() if hasattr(item, "_initrequest") else None
    for report in runtestprotocol(item, nextitem=nextitem, log=False):
        item.ihook.pytest_runtest_logreport(report=report)
    return True
'''


@pytest.fixture
def mine(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """A session of a project with traces and tests, which remembers its failures."""
    for name in ("model", "traces"):
        shutil.copytree(home / name, tmp_path / name)
    (tmp_path / "test_own.py").write_text(OWN)
    (tmp_path / "again.py").write_text(AGAIN)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda *words: session(tmp_path, *words, "--rootdir=.", "-p", "cacheprovider")


def failed(ran: Ran) -> list[str]:
    return [line.split()[1] for line in ran.out.splitlines() if line.startswith("FAILED ")]


def test_failed_items_run_first_alone_or_by_their_id(mine: Callable[..., Ran]) -> None:
    words = (*TRACES, "test_own.py", "-k", "not drawn", "-q")
    listed = [line for line in mine(*words, "--co").out.splitlines() if "::" in line]
    assert len(listed) == 4 and {WRONG, f"traces/short.jsonl::{BAD}"} < {*listed}
    first = mine(*words)
    assert "2 failed, 2 passed" in first.out and failed(first) == [WRONG, f"traces/short.jsonl::{BAD}"], first
    assert "2 failed" in (again := mine(*words, "--lf")).out and "passed" not in again.out
    assert failed(mine(*words, "--ff", "-x")) == [WRONG] and failed(mine(WRONG, "-q")) == [WRONG]
    assert failed(mine(*words, "--lf", "-k", "FORGETFUL")) == [f"traces/short.jsonl::{BAD}"]
    assert failed(mine(WRONG, "-q", "-p", "no:cacheprovider")) == [WRONG]


def test_summary_and_junit_have_the_message_and_the_example(mine: Callable[..., Ran], tmp_path: Path) -> None:
    ran = mine("test_own.py", "-q", f"--junitxml={tmp_path / 'j.xml'}")
    assert f"FAILED {WRONG} - DIVER" in ran.out and "::test_drawn - DIVERGED  drawn" in ran.out, ran.out
    assert "- Notes -" in ran.out and "work=<Workload drawn: small(), of events" in ran.out, ran.out
    assert "  0 admit  a into slot" in ran.out and "tensor(" not in ran.out
    told = [one.get("message", "") for one in ElementTree.parse(tmp_path / "j.xml").iter("failure")]
    assert len(told) == 2 and all(one.startswith("DIVERGED  ") for one in told)


def test_rerun_test_is_counted_once(mine: Callable[..., Ran], tmp_path: Path) -> None:
    ran = mine(*TRACES[:1], f"--instep-ops={BAD}", "-q", "-p", "again", f"--instep-out={tmp_path / 'out'}",
               f"--junitxml={tmp_path / 'j.xml'}")
    assert "1 failed" in ran.out and "instep: 1 DIVERGED: " in ran.out and ran.out.count("page.html") == 1, ran
    names = [one.get("name") for one in ElementTree.parse(tmp_path / "j.xml").iter("property")]
    assert len(names) == len({*names}) > 5


@pytest.mark.parametrize("words", [
    ("--instep-traces=traces", "--instep-ops=nope"), ("traces/short.jsonl::nope",), ("-c", "set.ini"),
    ("-c", "set.ini", "traces"),
])  # fmt: skip
def test_wrong_setting_is_one_usage_error_with_workers(
    mine: Callable[..., Ran], words: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "set.ini").write_text("[pytest]\ninstep_traces = traces\ninstep_ops = nope\n")
    ran = mine("-p", "xdist.plugin", "-n", "2", "--dist=worksteal", *words)
    assert ran.code == 4 and ran.err.count("ERROR: ") == 1 and "--instep-ops: ops: found 'nope'" in ran.err, ran
    assert "INTERNALERROR" not in ran.out and "workers" not in ran.out


@WHOLE
def test_workers_send_the_figures_of_the_summary(mine: Callable[..., Ran]) -> None:
    words = ("-p", "instep.plugin", "-p", "xdist.plugin", "-n", "1", "--dist=loadgroup", "-q", *TRACES)
    ran = mine(*words, "test_own.py", "-k", "not drawn")
    assert "2 failed, 2 passed" in ran.out and "instep: 1 DIVERGED, 1 agrees: " in ran.out, ran.out
