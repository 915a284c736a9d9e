"""The engine with requests that sample next to greedy ones: every choice and every byte equals the reference's.

Leaves out: the op (`test_draw.py`), and the harness's judgement of a difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from instep_optimized import OptimizedEngine, Options, load
from instep_optimized.ops.watch_op_calls import around
from instep_reference.contract.adaptive_controller_file import AdaptiveFile, Bracket
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Admit, Draft, Finish, Forward, Load, Preempt, Resume, Row, Save
from instep_reference.contract.place_names import unseen
from instep_reference.contract.sampling import Sampling
from instep_reference.engine import ReferenceEngine
from instep_reference.label_ledger import LedgerEngine
from instep_reference.weights import Weights
from support.checkpoints import write
from support.covering import WHOLE, few
from support.sampled import sampled
from support.two_sides import CAPACITY, TwoSides, scenario

STEPS = (3, 1, 7, 0)


def sides(path: Path, ops: str, *, watched: bool = True, **options: Any) -> TwoSides:
    """Both in fp64, so that no draw lies near a bound; `ledger` moves labels."""
    checkpoint = Checkpoint.open(write(path, "dense", num_hidden_layers=2, full_attention_interval=2))
    wide = {} if ops == "ledger" else {"activation": torch.float64, "state": torch.float64}
    file = AdaptiveFile(flat=Bracket(candidate_steps=(0, 1, 7), warmup_batches=1, update_interval=2))
    subject = OptimizedEngine(
        checkpoint, load(ops), Options(**wide, **options), CAPACITY, num_steps=STEPS[0], adaptive=file)  # type: ignore[arg-type]
    if ops == "ledger":
        return TwoSides(subject, LedgerEngine(checkpoint.config, num_steps=STEPS[0], adaptive=file), watched=watched)
    weights = Weights.of(checkpoint, torch.float64)
    return TwoSides(subject, ReferenceEngine(weights, num_steps=STEPS[0], adaptive=file), watched=watched)


@few(2)
@pytest.mark.slow
@pytest.mark.parametrize(("ops", "forced", "options"), [
    ("ledger", True, {}), ("plain", False, {}), ("ledger", False, {"graphs": True}),
    pytest.param("plain", True, {"graphs": True, "strategy": "snapshot"}, marks=WHOLE),
    ("ledger", True, {"overlap": True, "strategy": "columns", "conv": "widened"}),
    pytest.param("ledger", False, {"strategy": "lazy_rerun"}, marks=WHOLE),
])  # fmt: skip
def test_engine_draws_the_tokens_of_the_reference(
    ops: str, forced: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    """Mixed batches, windows and single rows in one forward, slots used again, preempt, resume and load."""
    both, verified = sides(tmp_path, ops, watched=not options.get("graphs"), **options), 0
    for event in sampled(scenario(64, STEPS, forced=forced), STEPS[0]):
        both(event)
        verified += isinstance(event, Forward) and any(len(row.uniforms) > 1 for row in event.rows)
    assert both.compared > 10_000 and verified > 5
    graphs = both.subject.graphs
    if graphs is not None:
        kinds = {key[0] for key, _, _ in graphs._captured}  # type: ignore[index]
        assert {"verify", "decode", "sampled verify"} <= kinds


def test_batch_without_sampling_runs_no_further_op(tmp_path: Path) -> None:
    """Not one op more, and no graph more before somebody samples."""
    calls: list[str] = []

    def counted(name: str, op: Any) -> Any:
        return lambda **given: (calls.append(name), op(**given))[1]

    checkpoint, plain = Checkpoint.open(write(tmp_path, "dense")), load("plain")
    ops = around(plain, unseen, counted)
    engine = OptimizedEngine(checkpoint, ops, Options(), CAPACITY, num_steps=1)
    for name, sampling in (("a", None), ("b", Sampling(0.0)), ("c", Sampling(1.0))):
        Admit(name, (1, 2), sampling).on(engine)
        Forward((Row(name, "prefill", 2, uniforms=(0.5,) if name == "c" else ()),)).on(engine)
    told = {}
    for names in ("ab", "ac"):
        Draft(tuple(names)).on(engine)
        calls.clear()
        Forward(tuple(Row(name, "verify", uniforms=(0.5,) * 3 if name == "c" else ()) for name in names)).on(engine)
        told[names] = list(calls)
        engine.commit(tuple(names))
    at = told["ab"].index("pick")
    assert told["ac"] == [*told["ab"][: at - 1], "select", "lm_head", "draw", *told["ab"][at + 1 :]]
    graphed = OptimizedEngine(checkpoint, plain, Options(graphs=True), CAPACITY, num_steps=1).graphs
    assert graphed is not None and not any("sampled" in str(key) for key, _, _ in graphed._captured)


def test_sampling_stays_with_the_request_and_not_the_state(tmp_path: Path) -> None:
    """The slot's row is written at admit and at resume; a loaded state does not change the sampling of its request."""
    both = sides(tmp_path, "ledger")
    both(Admit("a", (1, 2), Sampling(0.5, top_k=3, top_p=0.75)))
    assert both.subject._memory.slot_table.sampling[4].tolist() == [0.5, 3, 0.75]
    both(Forward((Row("a", "prefill", 2, root=5, uniforms=(0.25,)),)))
    both(Save("a", "kept"))
    both(Preempt("a"))
    both(Admit("b", (1, 2), Sampling(2.0)))  # takes the slot
    both(Load("b", "kept"))
    both(Resume("a"))
    both(Forward((Row("b", "decode", root=1, uniforms=(0.5,)), Row("a", "decode", root=2, uniforms=(0.75,)))))
    both(Preempt("b"))
    both(Finish("a"))
    both(Resume("b"))
    both(Forward((Row("b", "decode", root=1, uniforms=(0.5,)),)))
    assert both.subject._memory.slot_table.sampling[4].tolist() == [2.0, 0, 1]
