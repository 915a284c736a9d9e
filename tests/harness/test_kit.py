"""The kit: its cases find planted faults and name them, workloads replay from memory, and an installed kit works.

Leaves out: the cases themselves (`tests/optimized`), and the replay.
"""

import json
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch.nn.functional import linear, silu

from instep import kit
from instep.campaign.shapes import shape
from instep.diagnose.mistakes.experts import CLAMPS, Clamp
from instep.kit.cases import CASES
from instep.kit.cases.real_sizes import REAL
from instep.kit.model_and_trace import POLICY
from instep.report.finding_tensors import files
from instep.trace.event_rules import EventRules
from instep_optimized import Options
from instep_optimized.memory_addresses import Part
from instep_optimized.ops.plain import mlp as plain_mlp
from instep_optimized.options import check
from instep_reference.contract.errors import BadInput, InstepError, Unsupported
from instep_reference.contract.recurrences import RECURRENCES
from support.running import processes
from support.running.command import Runner, advances, complaint
from support.running.covering import WHOLE, few
from support.wrong.engines import right as make
from support.wrong.kit_ops import FORGETFUL, PLAIN

TOP = Path(__file__).resolve().parents[2]
PAGE, EXAMPLE = (TOP / "docs" / "kit.md").read_text(), TOP / "fixtures" / "example"
small = cache(kit.small)  # made once and never changed
Change = Callable[[dict[str, Any]], dict[str, Any]]


def changed(op: str, change: Change = dict, then: Any = lambda out, given: out) -> Any:
    """`plain` with one op whose arguments or result are changed."""
    own = getattr(PLAIN, op)
    return replace(PLAIN, name="wrong", **{op: lambda **given: then(own(**change(given)), given)})


def parts(**fields: Callable[[Part], Any]) -> Change:
    return lambda given: {**given, "parts": tuple(
        replace(part, **{name: make(part) for name, make in fields.items()}) for part in given["parts"])}


def beside(out: Any, given: dict[str, Any]) -> Any:
    """Also write after the unit of the first request."""
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
    "begun-anew": ("gdn", changed("gdn", parts(fresh=lambda part: part.fresh | True)),
                   "the state before the first row is taken as zero"),
    "no-decay": ("gdn", changed("gdn", lambda given: {**given, "inputs": given["inputs"]._replace(
        log_decay=given["inputs"].log_decay * 0)}), "the decay is missing: nothing is forgotten"),
    "not-fresh": ("gdn", changed("gdn", parts(fresh=lambda part: part.fresh & False)), "not finite"),
    "red-zone": ("gdn", changed("gdn", then=beside), "the first in the red zone after unit 1"),
    "idle-row": ("gdn", changed("gdn", then=lambda out, given: out + 1e-9), "rows that no request covers are not zero"),
    "another-row": ("gdn", changed("gdn", then=lambda out, given: out.roll(1, 0)), "read-out"),
    "2^-12": ("linear", changed("linear", then=lambda out, given: out * (1 + 2.0**-12)), "relative error"),
    "silu": ("conv", changed("conv", then=lambda out, given: out * 1.01), "conv output"),
    "dtype": ("lm_head", changed("lm_head", then=lambda out, given: out.double()), "torch.float32 is due"),
    "rows": ("norm", changed("norm", then=lambda out, given: out[1:]), "rows that came back"),
    "input": ("mlp", changed("mlp", then=into("x")), "the launch changed its input x"),
    "tie": ("pick", changed("pick", lambda given: {**given, "logits": given["logits"].flip(1)}), "not those of plain"),
    "page": ("attend", changed("attend", lambda given: {
        **given, "pages": replace(given["pages"], before=given["pages"].before + 1)}), "relative error"),
    "log-probs": ("topk_tokens", changed("topk_tokens", then=lambda out, given: out._replace(
        log_probs=out.log_probs + 1e-4)), "log_probs are off by 1.00e-04"),
    "pool": ("store_rows", changed("store_rows", lambda given: {**given, "rows": -given["rows"]}), "pool: "),
}


@few(4)
@pytest.mark.slow
@pytest.mark.parametrize(("op", "ops", "says"), WRONG.values(), ids=WRONG)
def test_wrong_op_is_found_by_its_cases_and_named(op: str, ops: Any, says: str) -> None:
    found = kit.served(kit.op_cases("gdn", dtype="float32")[::3] if op == "gdn" else kit.op_cases(op), ops)
    assert found.exit is kit.Exit.DIVERGED and says in "\n".join(
        f"{found.where(one)}, {one.diagnosis}" for one in found.verdict.findings)
    with pytest.raises(kit.Divergence, match=f"op {op} of wrong") as failed:
        found.must_agree()
    assert isinstance(failed.value, AssertionError) and not failed.value.pytrace
    assert "instep op" not in str(failed.value)  # no command finds an object that has no name


@pytest.mark.parametrize("op", [
    "norm", "gated_norm", "gated_group_norm", "attention_inputs", "key_inputs", "latent_inputs"])
def test_norm_without_its_eps_is_found(op: str) -> None:
    wrong = changed(op, lambda given: {**given, "eps": 0.0})
    assert kit.served(kit.op_cases(op, dtype="float32"), wrong).exit is kit.Exit.DIVERGED


def test_a_linear_layer_is_judged_as_the_component_that_its_call_names() -> None:
    """One channel of the mixer is one unit of bf16 off. Nothing else finds that."""

    def one_more(out: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        if given["to"].component == "mixer" and out.dtype == torch.bfloat16:
            out.view(torch.int16)[..., 3] += 1
        return out

    for once, found in (((), False), (("hidden", "z"), False), (("mixer",), True)):
        served = [kit.served(kit.op_cases("linear"), replace(ops, once=once)) for ops in (
            PLAIN, changed("linear", then=one_more))]
        assert [one.exit is kit.Exit.DIVERGED for one in served] == [False, found]
        assert {one.place.component for one in served[1].verdict.findings} == ({"mixer"} if found else set())


KINDS = {
    "tuple": ("gdn", lambda out, given: (out, None), "a tuple came back, a tensor is due"),
    "none": ("gdn", lambda out, given: None, "None came back, a tensor is due"),
    "numpy": ("gdn", lambda out, given: out.float().numpy(), "a numpy.ndarray came back, a tensor is due"),
    "no-rows": ("gdn", lambda out, given: out.sum(), "a tensor without axes came back"),
    "meta": ("conv", lambda out, given: out.to("meta"), "a meta tensor came back"),
    "no-names": ("gdn_inputs", lambda out, given: tuple(out), "a tuple came back, GdnInputs (q, k, v, "),
    "a-field": ("gdn_inputs", lambda out, given: out._replace(k=None), "k: None came back, a tensor is due"),
}


@pytest.mark.parametrize(("op", "then", "says"), KINDS.values(), ids=KINDS)
def test_result_of_a_wrong_type_is_found_by_cases_and_by_a_run(op: str, then: Any, says: str) -> None:
    ops = changed(op, then=then)
    one = kit.served(kit.op_cases(op)[0], ops)
    run = kit.replayed(small(), ops, until=3)
    assert (one.exit, run.exit) == (kit.Exit.DIVERGED,) * 2 and says in one.message and says in run.message


@pytest.mark.parametrize("then", [
    lambda out, given: 5, lambda out, given: torch.tensor(1.0), lambda out, given: given["pool"]])
def test_return_value_is_ignored_when_an_op_only_writes(then: Any) -> None:
    ops = changed("store_rows", then=then)
    assert kit.served(kit.op_cases("store_rows")[:2], ops).must_agree()
    assert kit.replayed(small(), ops, until=2).must_agree()


@few(6)
@pytest.mark.parametrize("op", sorted({case.op for case in CASES}))
def test_right_op_agrees_on_every_case(op: str) -> None:
    """The cases include trees and bf16 states."""
    cases = [case for case in CASES if case.op == op]
    found = kit.served(cases, PLAIN)
    assert found.must_agree() and not found.verdict.skipped
    assert {one.event for one in found.verdict.compared} == {*range(len(cases))}


@pytest.mark.parametrize("op", ["gdn", "conv", "attend"])
def test_drawn_cases_agree_and_are_named_by_their_numbers(op: str) -> None:
    drawn = kit.op_cases(op, drawn=3, seed=3)[-3:]
    assert kit.served(drawn, PLAIN).must_agree()
    (again,) = kit.op_cases(op, case=drawn[2].name)
    mine, theirs = (case.build("cpu") for case in (drawn[2], again))
    assert all(torch.equal(mine.pools[name].raw.isnan(), pool.raw.isnan()) for name, pool in theirs.pools.items())
    with pytest.raises(BadInput, match="--case"):
        kit.op_cases(op, case="drawn-x")


def test_cases_of_real_sizes_are_chosen_by_option_and_name() -> None:
    cases = kit.op_cases("attend", real=True, dtype="bfloat16")
    assert [case.name for case in cases] == [f"real-{what}-bfloat16" for what in ("decode", "verify", "prefill")]
    assert {case.op for case in REAL} == {*RECURRENCES, "conv", "attend", "attend_latents"} and not {*REAL} & {*CASES}
    (one,) = kit.op_cases("attend", case="real-verify-bfloat16")
    assert one in cases and one.build("cpu").inputs["query"].shape[1:] == (16, 256)
    assert kit.served(one, PLAIN).must_agree()
    with pytest.raises(BadInput, match=f"expected one of {', '.join(RECURRENCES)}, conv, attend"):
        kit.op_cases("norm", real=True)


@pytest.mark.parametrize("broken", [False, True])
def test_raw_kernel_is_compared_on_cases_of_gdn(broken: bool) -> None:
    text = re.findall(r"```python\n(.*?)```", (TOP / "docs" / "pooled.md").read_text(), re.S)[0]
    names: dict[str, Any] = {}
    exec(text.replace("repeat_interleave(heads, dim=1)", "repeat(1, heads, 1)") if broken else text, names)
    found = kit.served(kit.op_cases("gdn", drawn=4, dtype="float32"), names["OPS"])
    assert found.exit is (kit.Exit.DIVERGED if broken else kit.Exit.AGREED), found.message
    reasons = [skip.reason for skip in found.verdict.skipped if "verify" in skip.where]
    assert any("in the unit that it has read" in reason for reason in reasons)
    judged = {found.cases[one.event].name for one in found.verdict.compared}
    assert {"snapshots-r2-VK-float32", "prefill-r2-VK-float32", "decode-r1-KV-float32"} <= judged


@pytest.mark.parametrize("packed", [False, True])
def test_packed_kernel_gets_contiguous_pools(packed: bool) -> None:
    seen: list[bool] = []

    def kernel(call: kit.Launch) -> torch.Tensor:
        seen.append(call.pool.is_contiguous())
        return NAMES["kernel"](call)

    NAMES: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", (TOP / "docs" / "pooled.md").read_text(), re.S)[0], NAMES)
    how = {"packed": True} if packed else {"strided": True}
    ops = kit.pooled(PLAIN, name="x", window=kernel, chunk=kernel, raw=True, **how)
    cases = [case for case in kit.op_cases("gdn", dtype="float32") if "VK" in case.name]
    assert kit.served(cases, ops).must_agree() and set(seen) == {packed}


def test_unserved_cases_are_inconclusive_and_an_error_is_a_finding() -> None:
    dense = replace(PLAIN, gdn=kit.dense(window=lambda **given: 1 / 0, chunk=lambda **given: 1 / 0))
    trees = [case for case in CASES if str(case) in ("gdn-trees-fp32", "gdn-chain")]
    none = kit.served(trees, dense)
    assert none.exit is kit.Exit.INCONCLUSIVE and "no windows that are trees" in none.message
    with pytest.raises(kit.Divergence, match="INCONCLUSIVE"):
        none.must_agree()
    assert "raised ZeroDivisionError" in kit.served(kit.op_cases("gdn")[0], dense).message
    of_gdn = replace(PLAIN, name="mine", kda=None)
    assert kit.served([*kit.op_cases("gdn")[:1], *kit.op_cases("kda")[:1]], of_gdn).must_agree()
    assert "mine has no op kda" in kit.served(kit.op_cases("kda")[0], of_gdn).message
    for op, other, says in (("mamba2", PLAIN.gdn, "which this recurrence does not have"),
                            ("gdn", PLAIN.mamba2, "the recall S^T k is missing")):  # fmt: skip
        swapped = replace(PLAIN, name="mine", **{op: other})
        assert says in kit.served(kit.op_cases(op, case="decode-r1-KV-float32"), swapped).message
    model = replace(shape("qwen3.5-9b"), layers=(("kda", "mlp"),))
    with pytest.raises(Unsupported, match="the ops of mine have no recurrence kda"):
        check(Options(), model, 1, of_gdn)
    for wrong in ("ledger", "support.wrong.engines:right"):
        with pytest.raises(BadInput, match="ops"):
            kit.served(kit.op_cases("pick"), wrong)


@WHOLE
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cases_of_clamped_experts_reach_every_limit(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some elements are clamped and some are not; so another clamp, or another limit, differs."""
    (case,) = kit.op_cases("moe", case=f"clamped-{dtype}")
    given = case.build("cpu").inputs
    weights = given["weights"]
    for gate_up, limit in ((weights.gate_up, weights.limit), (weights.shared_gate_up, weights.shared_limit)):
        gate, up = (given["x"].double() @ gate_up.double().transpose(-1, -2)).chunk(2, dim=-1)
        for beyond in (silu(gate) > limit, up > limit, up < -limit):
            assert 0.1 < beyond.double().mean() < 0.6
    assert kit.served(case, PLAIN).must_agree()
    limits = {"limit": (None, weights.shared_limit), "shared_limit": (None, weights.limit)}
    for one in [{name: value} for name, values in limits.items() for value in values]:
        other = changed("moe", lambda given, one=one: {**given, "weights": replace(given["weights"], **one)})
        assert kit.served(case, other).exit is kit.Exit.DIVERGED, one
    for says, clamp in CLAMPS:
        def swiglu(x: Any, gate_up: Any, down: Any, limit: float, clamp: Clamp = clamp) -> torch.Tensor:
            gate, up = clamp(*linear(x, gate_up.to(x.dtype)).chunk(2, dim=-1), limit)
            return linear(gate * up, down.to(x.dtype))

        monkeypatch.setattr(plain_mlp, "_swiglu", swiglu)
        assert kit.served(case, PLAIN).exit is kit.Exit.DIVERGED, says


@pytest.mark.parametrize(("asked", "says"), [
    ({"dtype": "foo"}, "dtype: found 'foo', expected one of float64, float32, bfloat16, float16"),
    ({"state_dtype": "bf16"}, "state_dtype: found 'bf16', expected"),
    ({"dtype": "float16"}, "gdn: no case has dtype float16: there are"),
    ({"dtype": torch.float16, "drawn": 2}, "gdn: no case has dtype float16: there are"),
    ({"state_dtype": "float8_e4m3fn"}, "gdn: no case has state_dtype float8_e4m3fn: there are float32, bfloat16"),
    ({"op": "pick", "dtype": "bfloat16"}, "pick: no case has dtype bfloat16: there are float32"),
    ({"op": None, "dtype": "float64"}, "every op: no case has dtype float64"),
    ({"case": "decode-r1-KV-float32", "dtype": "bfloat16"}, "gdn: no case has dtype bfloat16: there are float32"),
])
def test_missing_cases_are_refused_instead_of_an_empty_list(asked: dict[str, Any], says: str) -> None:
    """pytest skips a test that is parametrized with an empty list, so a user would not see that nothing ran."""
    with pytest.raises(InstepError, match=re.escape(says)):
        kit.op_cases(**{"op": "gdn", **asked})


def test_dtype_may_be_a_torch_dtype() -> None:
    assert kit.op_cases("gdn", dtype=torch.bfloat16) == kit.op_cases("gdn", dtype="bfloat16")


REPLAYED: list[tuple[dict[str, Any], str]] = [
    ({"what": 5}, "what: found 5 (int), expected a workload, a trace or the file of one"),
    ({"what": []}, "what: found [] (list)"),
    ({"subject": 5}, "subject: found 5 (int), expected an op set or an engine"),
    ({"stratgy": "snapshot"}, "stratgy: found no parameter of replayed, expected strategy"),
    ({"check_point": "x"}, "check_point: found no parameter of replayed, expected checkpoint"),
    ({"zzz": 1}, "zzz: found no parameter of replayed, expected one of chunk_dtype, comm, conv, device"),
    ({"ops": "plain"}, "ops: found no parameter of replayed, expected subject"),
    ({"handed": PLAIN}, "handed: found no parameter of replayed, expected subject"),
    ({"engine": "support.wrong.engines:right", "subject": "ledger"}, "engine: found it together with ledger"),
    ({"strategy": 5}, "strategy: found 5 (int), expected a text"),
    ({"graphs": "yes"}, "graphs: found 'yes' (str), expected True or False"),
    ({"graphs": 1}, "graphs: found 1 (int), expected True or False"),
    ({"tiers": "T0"}, "tiers: found 'T0' (str), expected a list, as ['T0']"),
    ({"tiers": [0]}, "tiers[0]: found 0 (int)"),
    ({"layers": 0}, "layers: found 0 (int), expected a list of layers, as [0]"),
    ({"layers": [True]}, "layers[0]: found True (bool)"),
    ({"until": "5"}, "until: found '5' (str), expected the number of an event"),
    ({"until": -1}, "until: found -1"), ({"until": True}, "until: found True (bool)"),
    ({"checkpoint": 5}, "checkpoint: found 5 (int)"),
    ({"checkpoint": "elsewhere"}, "checkpoint: found one for a workload, expected none"),
]
SMALL: list[tuple[dict[str, Any], str]] = [
    ({"linear_headdim": 6}, "linear_headdim: found no parameter of the model, expected linear_key_head_dim"),
    ({"prompt": {}}, "prompt: found no parameter of the model, expected prompts"),
    ({"moe_intermediate_size": 32}, "moe_intermediate_size: found no parameter of the model"),  # it has no experts
    ({"linear_value_head_dim": "x"}, "linear_value_head_dim: found 'x'"),
    ({"prompts": 5}, "prompts: found 5 (int), expected a dict"),
    ({"prompts": {"one": "text"}}, "prompts['one']: found 'text' (str), expected a list of tokens"),
    ({"policy": "x"}, "policy: found 'x' (str), expected a Policy"),
]
GIVEN = [(lambda given=given: kit.replayed(**{"what": small(), **given}), says) for given, says in REPLAYED]
GIVEN += [(lambda given=given: kit.small(**given), says) for given, says in SMALL]
GIVEN += [(lambda: kit.served(5, PLAIN), "cases: found 5 (int)"), (lambda: kit.served([5], PLAIN), "cases[0]: found 5"),
          (lambda: kit.traces(event=3).example(), "event: found no parameter of the model, expected events")]


@pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")
@pytest.mark.parametrize(("call", "says"), GIVEN, ids=[says[:40] for _, says in GIVEN])
def test_wrong_argument_is_named_with_the_expected_value(call: Callable[[], object], says: str) -> None:
    with pytest.raises(BadInput, match=re.escape(says)):
        call()


def test_small_has_every_event_and_shows_a_transposed_state() -> None:
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
def test_workload_is_replayed_from_memory_and_from_files(tmp_path: Path) -> None:
    work = kit.small()
    assert kit.replayed(work, PLAIN, strategy="snapshot", until=9).must_agree().outcomes[0].verdict.events == 10
    file = work.write(tmp_path)
    wrong = kit.replayed(file, replace(FORGETFUL, name="mine"), until=8)
    assert wrong.exit is kit.Exit.DIVERGED and "optimized[mine]" in wrong.message
    assert "instep replay" not in wrong.message  # no command finds this op set
    one, two = (files(wrong.outcomes * runs, tmp_path) for runs in (1, 2))  # as of two strategies
    assert len(two) == 2 * len(one) > 0, "runs of one name do not write over each other"
    line = kit.replayed(file, FORGETFUL, until=8).message.splitlines()[-1]
    assert line.strip().startswith(f"instep replay {file} --ops support.wrong.kit_ops:FORGETFUL --until"), line
    assert kit.replayed(work, make, until=8).must_agree().outcomes[0].plan.setting.name == "support.wrong.engines:right"
    with pytest.raises(BadInput, match="subject"):
        kit.replayed(work, lambda: None)
    with pytest.raises(kit.Divergence, match="INCONCLUSIVE"):
        kit.replayed(work, until=0).must_agree()


@pytest.mark.slow
@settings(max_examples=30, deadline=None, database=None, derandomize=True)
@given(work=kit.traces(), config=kit.configurations(), prompts=kit.prompts(vocab=5))
def test_drawn_traces_models_and_prompts_are_legal(work: Any, config: Any, prompts: Any) -> None:
    rules = EventRules(work.trace.header)
    for event in work.trace.events:
        rules.check(event)
        rules.apply(event)
    assert config["linear_key_head_dim"] != config["linear_value_head_dim"]
    assert {*prompts} == {"one", "few", "more"} and all(0 <= token < 5 for said in prompts.values() for token in said)


@WHOLE
def test_drawn_traces_reach_events_that_often_fail() -> None:
    """50 traces: kept data is moved only with tracked prefixes, so other traces have room for commits."""
    command = [sys.executable, "-m", "support.inputs.drawn_traces"]
    done = processes.run(command, timeout=300, env={"PYTHONPATH": ":".join(sys.path)})
    assert done.returncode == 0, done.stderr
    least = {"commits": 28, "of two": 9, "ragged": 6, "rejects": 25}
    for prefixes, seen in zip((False, True), json.loads(done.stdout), strict=True):
        assert all(seen[what] >= count for what, count in least.items()), seen
        assert seen.get("moves", 0) >= 4 if prefixes else "moves" not in seen, seen


@settings(max_examples=2, deadline=None, database=None, derandomize=True)
@given(prompts=kit.prompts(), config=kit.configurations())
def test_drawn_model_agrees(prompts: Any, config: Any) -> None:
    kit.replayed(kit.small(prompts=prompts, **config), until=4).must_agree()


def test_page_has_the_example_and_every_public_name() -> None:
    code = re.search(r"```python\n(.*?)```", PAGE, re.S)
    assert code is not None and (EXAMPLE / "test_mine.py").read_text().endswith(code[1])
    assert code[1].count("\n") < 25
    for name in {*kit.__all__} - {"Case", "Exit", "Launch", "ConvLaunch", "Served", "Replayed", "Workload", "load",
                                  "dense", "pooled", "dense_conv", "pooled_conv"}:
        assert re.search(rf"\b{name}\b", PAGE), name
    assert all(getattr(kit, name) is not None for name in kit.__all__)


@WHOLE
def test_example_suite_runs_with_the_installed_package(tmp_path: Path) -> None:
    """The packages and files that `pyproject.toml` puts into a wheel, with their compiled files."""
    site, home = tmp_path / "site", tmp_path / "home"
    wheel = tomllib.loads((TOP / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    for package in wheel["packages"]:
        shutil.copytree(TOP / package, site / Path(package).name)
    (site / "instep" / "fixtures").mkdir()
    shutil.copytree(EXAMPLE, home, ignore=shutil.ignore_patterns("__pycache__"))
    test = home / "test_mine.py"
    test.write_text(test.read_text().replace("max_examples=10", "max_examples=2"))
    (home / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    done = processes.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "instep.plugin",
         "-k", "not rerun and not scrambled"],
        cwd=home, timeout=240, env={**env, "PYTHONPATH": str(site),
        "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout + done.stderr


# ---- the command -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_instep_op_prints_each_op_and_refuses_unknown_names(instep: Runner, tmp_path: Path) -> None:
    ran = instep("op", "plain", "gdn", "norm", "--drawn", "2", "--json", tmp_path / "r.json")
    assert ran.code == 0 and " agrees: " in ran.out and "allowance used" in ran.out, ran
    assert '"used": ' in (tmp_path / "r.json").read_text()
    wrong = instep("op", "support.wrong.kit_ops:FORGETFUL", "gdn", "--drawn", "0")
    line = "instep op support.wrong.kit_ops:FORGETFUL gdn --case decode-r1-KV-float32"
    assert wrong.code == 1 and "holds what was there before the launch" in wrong.out and line in wrong.out, wrong
    again = instep(*line.split()[1:])
    assert again.code == 1 and "decode-r1-KV-float32, request 0" in again.out
    assert "expected one of embed" in complaint(instep("op", "plain", "gdm"))
    assert "expected an op set" in complaint(instep("op", "ledger", "gdn"))
    assert "--case" in complaint(instep("op", "plain", "--case", "decode"))
    assert "there are float32, bfloat16" in complaint(instep("op", "plain", "gdn", "--state-dtype", "float16"))
    assert "move case commit-state\n" in kit.served(kit.op_cases("move"), changed("move", lambda given: {
        **given, "target": replace(given["target"], units=given["target"].units.clamp(min=0))})).message


def test_instep_op_shows_its_progress(instep: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = advances(monkeypatch)
    assert instep("op", "plain", "embed", "concat", "--drawn", 0).code == 0
    assert [(done, of) for _, done, of in seen] == [(number, 4) for number in range(4)]
    assert all("embed" in what or "concat" in what for what, _, _ in seen)
