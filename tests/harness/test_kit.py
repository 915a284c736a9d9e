"""The kit: cases of ops find planted mistakes and name them, workloads replay from memory, and it works installed.

Leaves out: the cases themselves (`tests/optimized`), and the replay.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from instep import kit
from instep.kit.cases import CASES
from instep.kit.workload import POLICY
from instep.trace.event_rules import EventRules
from instep_optimized.layout import Part
from instep_reference.contract.errors import BadInput
from support import warm
from support.by_verbs import right as make
from support.command import Runner, complaint
from support.kit_ops import FORGETFUL, PLAIN

TOP = Path(__file__).resolve().parents[2]
PAGE, EXAMPLE = (TOP / "docs" / "kit.md").read_text(), TOP / "fixtures" / "example"


Change = Callable[[dict[str, Any]], dict[str, Any]]


def changed(op: str, change: Change = dict, then: Any = lambda out, given: out) -> Any:
    """`plain` with one op that gets other arguments, or whose result is changed."""
    own = getattr(PLAIN, op)
    return replace(PLAIN, name="wrong", **{op: lambda **given: then(own(**change(given)), given)})


def parts(**fields: Callable[[Part], Any]) -> Change:
    return lambda given: {**given, "parts": tuple(
        replace(part, **{name: make(part) for name, make in fields.items()}) for part in given["parts"])}


def beside(out: Any, given: dict[str, Any]) -> Any:
    """Also writes behind the unit of the first request."""
    for part in given["parts"]:
        pool = part.read.pool
        pool.as_strided((pool[1].numel() + 1,), (1,), pool[1].storage_offset())[-1] = 0
    return out


def into(name: str) -> Any:
    def write(out: Any, given: dict[str, Any]) -> Any:
        given[name].zero_()
        return out

    return write


WRONG = {
    "not-stored": ("gdn", changed("gdn", parts(store=lambda part: None)), "holds what was there before the launch"),
    "begun-anew": ("gdn", changed("gdn", parts(fresh=lambda part: part.fresh | True)), "the state is begun anew"),
    "no-decay": ("gdn", changed("gdn", lambda given: {**given, "inputs": given["inputs"]._replace(
        log_decay=given["inputs"].log_decay * 0)}), "nothing is forgotten: the decay is left out"),
    "not-fresh": ("gdn", changed("gdn", parts(fresh=lambda part: part.fresh & False)), "not finite"),
    "red-zone": ("gdn", changed("gdn", then=beside), "the first in the red zone behind unit 1"),
    "idle-row": ("gdn", changed("gdn", then=lambda out, given: out + 1e-9), "rows that no request covers are not zero"),
    "another-row": ("gdn", changed("gdn", then=lambda out, given: out.roll(1, 0)), "read-out"),
    "2^-12": ("linear", changed("linear", then=lambda out, given: out * (1 + 2.0**-12)), "relative error"),
    "silu": ("conv", changed("conv", then=lambda out, given: out * 1.01), "conv output"),
    "dtype": ("lm_head", changed("lm_head", then=lambda out, given: out.double()), "torch.float32 is due"),
    "rows": ("norm", changed("norm", then=lambda out, given: out[1:]), "rows came back"),
    "input": ("mlp", changed("mlp", then=into("x")), "the launch changed its input x"),
    "tie": ("pick", changed("pick", lambda given: {**given, "logits": given["logits"].flip(1)}), "not those of plain"),
    "page": ("attend", changed("attend", lambda given: {
        **given, "pages": replace(given["pages"], before=given["pages"].before + 1)}), "relative error"),
    "log-probs": ("topk_tokens", changed("topk_tokens", then=lambda out, given: out._replace(
        log_probs=out.log_probs + 1e-4)), "log_probs are off by 1.00e-04"),
    "pool": ("store_rows", changed("store_rows", lambda given: {**given, "rows": -given["rows"]}), "pool: "),
}


@pytest.mark.slow
@pytest.mark.parametrize(("op", "ops", "says"), WRONG.values(), ids=WRONG)
def test_a_wrong_op_is_found_by_its_cases_and_named(op: str, ops: Any, says: str) -> None:
    found = kit.served(kit.op_cases(op), ops)
    assert found.exit is kit.Exit.DIVERGED and says in "\n".join(
        f"{found.where(one)}, {one.diagnosis}" for one in found.verdict.findings)
    with pytest.raises(kit.Divergence, match=f"op {op} of wrong") as failed:
        found.must_agree()
    assert isinstance(failed.value, AssertionError) and not failed.value.pytrace
    assert "instep op" not in str(failed.value)  # no command finds an object that has no name


@pytest.mark.parametrize("op", sorted({case.op for case in CASES}))
def test_a_right_op_agrees_on_every_case(op: str) -> None:
    """Trees and states in bf16 among them."""
    cases = [case for case in CASES if case.op == op]
    found = kit.served(cases, PLAIN)
    assert found.must_agree() and not found.verdict.skipped
    assert {one.event for one in found.verdict.compared} == {*range(len(cases))}


@pytest.mark.parametrize("op", ["gdn", "conv", "attend"])
def test_drawn_cases_are_right_too_and_their_numbers_name_them(op: str) -> None:
    drawn = kit.op_cases(op, drawn=3, seed=3)[-3:]
    assert kit.served(drawn, PLAIN).must_agree()
    (again,) = kit.op_cases(op, case=drawn[2].name)
    mine, theirs = (case.build("cpu") for case in (drawn[2], again))
    assert all(torch.equal(mine.pools[name].raw.isnan(), pool.raw.isnan()) for name, pool in theirs.pools.items())
    with pytest.raises(BadInput, match="--case"):
        kit.op_cases(op, case="drawn-x")


@pytest.mark.parametrize("broken", [False, True])
def test_a_kernel_that_norms_and_gates_inside_is_judged_where_it_serves_gdn(broken: bool) -> None:
    text = re.findall(r"```python\n(.*?)```", (TOP / "docs" / "adapters.md").read_text(), re.S)[1]
    names: dict[str, Any] = {}
    exec(text.replace("repeat_interleave(heads, dim=1)", "repeat(1, heads, 1)") if broken else text, names)
    found = kit.served(kit.op_cases("gdn", drawn=4, dtype="float32"), names["OPS"])
    assert found.exit is (kit.Exit.DIVERGED if broken else kit.Exit.AGREED), found.message
    assert any("verify" in skip.where and "where it has read it" in skip.reason for skip in found.verdict.skipped)
    judged = {found.cases[one.event].name for one in found.verdict.compared}
    assert {"snapshots-r2-VK-float32", "prefill-r2-VK-float32", "decode-r1-KV-float32"} <= judged


@pytest.mark.parametrize("packed", [False, True])
def test_a_kernel_that_takes_no_strides_gets_pools_that_lie_side_by_side(packed: bool) -> None:
    seen: list[bool] = []

    def kernel(call: kit.Launch) -> torch.Tensor:
        seen.append(call.pool.is_contiguous())
        return NAMES["kernel"](call)

    NAMES: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", (TOP / "docs" / "adapters.md").read_text(), re.S)[1], NAMES)
    how = {"packed": True} if packed else {"strided": True}
    ops = kit.pooled(PLAIN, name="x", window=kernel, chunk=kernel, raw=True, **how)
    cases = [case for case in kit.op_cases("gdn", dtype="float32") if "VK" in case.name]
    assert kit.served(cases, ops).must_agree() and set(seen) == {packed}


def test_what_serves_no_case_is_inconclusive_and_what_raises_is_a_finding() -> None:
    dense = replace(PLAIN, gdn=kit.dense(window=lambda **given: 1 / 0, chunk=lambda **given: 1 / 0))
    trees = [case for case in CASES if str(case) in ("gdn-trees-fp32", "gdn-chain")]
    none = kit.served(trees, dense)
    assert none.exit is kit.Exit.INCONCLUSIVE and "no windows that are trees" in none.message
    with pytest.raises(kit.Divergence, match="INCONCLUSIVE"):
        none.must_agree()
    assert "raised ZeroDivisionError" in kit.served(kit.op_cases("gdn")[0], dense).message
    for wrong in ("ledger", "support.by_verbs:right"):
        with pytest.raises(BadInput, match="ops"):
            kit.served(kit.op_cases("pick"), wrong)


def test_small_has_every_kind_of_event_and_cannot_hide_a_transposed_state() -> None:
    work = kit.small()
    config = work.checkpoint.config
    assert config.key_dim != config.value_dim and config.value_heads == 2 * config.key_heads
    kinds = {str(event.__struct_config__.tag) for event in work.trace.events}
    assert kinds >= {"admit", "forward", "draft", "commit", "set_num_steps", "preempt", "resume", "save", "load",
                     "abort", "idle", "finish"}
    assert len(work.trace.events) == 27 and len({*POLICY.capacity.slots}) < len(POLICY.arrivals)
    assert {row.kind for event in work.trace.events for row in getattr(event, "rows", ())} == {
        "prefill", "verify", "decode"}


@pytest.mark.slow
def test_a_workload_is_replayed_from_memory_and_from_its_files_with_objects_and_names(tmp_path: Path) -> None:
    work = kit.small()
    assert kit.replayed(work, PLAIN, strategy="snapshot", until=9).must_agree().outcomes[0].verdict.events == 10
    file = work.write(tmp_path)
    wrong = kit.replayed(file, replace(FORGETFUL, name="mine"), until=8)
    assert wrong.exit is kit.Exit.DIVERGED and "optimized[mine]" in wrong.message
    assert "instep replay" not in wrong.message  # no command finds this op set
    line = kit.replayed(file, FORGETFUL, until=8).message.splitlines()[-1]
    assert line.strip().startswith(f"instep replay {file} --ops support.kit_ops:FORGETFUL --until"), line
    assert kit.replayed(work, make, until=8).must_agree().outcomes[0].plan.setting.name == "support.by_verbs:right"
    with pytest.raises(BadInput, match="subject"):
        kit.replayed(work, lambda: None)
    with pytest.raises(kit.Divergence, match="INCONCLUSIVE"):
        kit.replayed(work, until=0).must_agree()


@pytest.mark.slow
@settings(max_examples=30, deadline=None, database=None, derandomize=True)
@given(work=kit.traces(), config=kit.configurations(), prompts=kit.prompts(vocab=5))
def test_drawn_traces_are_legal_and_drawn_models_and_prompts_fit(work: Any, config: Any, prompts: Any) -> None:
    rules = EventRules(work.trace.header)
    for event in work.trace.events:
        rules.check(event)
        rules.apply(event)
    assert config["linear_key_head_dim"] != config["linear_value_head_dim"]
    assert {*prompts} == {"one", "few", "more"} and all(0 <= token < 5 for said in prompts.values() for token in said)


@settings(max_examples=2, deadline=None, database=None, derandomize=True)
@given(prompts=kit.prompts(), config=kit.configurations())
def test_a_drawn_model_agrees(prompts: Any, config: Any) -> None:
    kit.replayed(kit.small(prompts=prompts, **config), until=4).must_agree()


def test_the_page_has_the_file_and_every_public_name() -> None:
    code = re.search(r"```python\n(.*?)```", PAGE, re.S)
    assert code is not None and (EXAMPLE / "test_mine.py").read_text().endswith(code[1])
    assert code[1].count("\n") < 25
    for name in {*kit.__all__} - {"Case", "Exit", "Launch", "ConvLaunch", "Served", "Replayed", "Workload", "load",
                                  "dense", "pooled", "dense_conv", "pooled_conv"}:
        assert re.search(rf"\b{name}\b", PAGE), name
    assert all(getattr(kit, name) is not None for name in kit.__all__)


@pytest.mark.slow
def test_the_example_suite_runs_against_the_installed_package_outside_the_checkout(tmp_path: Path) -> None:
    """The packages and files that a wheel has, by `pyproject.toml`, and nothing else of the checkout."""
    site, home = tmp_path / "site", tmp_path / "home"
    wheel = tomllib.loads((TOP / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    for package in wheel["packages"]:
        shutil.copytree(TOP / package, site / Path(package).name, ignore=shutil.ignore_patterns("__pycache__"))
    (site / "instep" / "fixtures").mkdir()
    shutil.copytree(EXAMPLE, home, ignore=shutil.ignore_patterns("__pycache__"))
    (home / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    done = warm.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "instep.plugin",
         "-k", "not rerun and not scrambled"],
        cwd=home, timeout=240, env={**env, "PYTHONPATH": str(site),
        "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout + done.stderr


# ---- the command -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_instep_op_tells_each_op_and_refuses_what_is_not_there(instep: Runner, tmp_path: Path) -> None:
    ran = instep("op", "plain", "gdn", "norm", "--drawn", "2", "--json", tmp_path / "r.json")
    assert ran.code == 0 and "AGREES: " in ran.out and "allowance used" in ran.out, ran
    assert '"used": ' in (tmp_path / "r.json").read_text()
    wrong = instep("op", "support.kit_ops:FORGETFUL", "gdn", "--drawn", "0")
    line = "instep op support.kit_ops:FORGETFUL gdn --case decode-r1-KV-float32"
    assert wrong.code == 1 and "holds what was there before the launch" in wrong.out and line in wrong.out, wrong
    again = instep(*line.split()[1:])
    assert again.code == 1 and "decode-r1-KV-float32, request 0" in again.out
    assert "expected one of embed" in complaint(instep("op", "plain", "gdm"))
    assert "expected an op set" in complaint(instep("op", "ledger", "gdn"))
    assert "--case" in complaint(instep("op", "plain", "--case", "decode"))
    assert instep("op", "plain", "gdn", "--state-dtype", "float16", "--drawn", "0").code == 3
    assert "move case commit-state\n" in kit.served(kit.op_cases("move"), changed("move", lambda given: {
        **given, "target": replace(given["target"], units=given["target"].units.clamp(min=0))})).message
