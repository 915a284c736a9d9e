"""Drawn choices before the harness: what a rounding may move and what it may not, known mistakes, and refusals.

Leaves out: the law of a draw (`tests/reference/test_sampling.py`) and planted faults, which run whole traces.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from instep.campaign.fuzz.draw_events import SAMPLINGS as FUZZED
from instep.checks.sampled_tokens import Row as DrawnRow
from instep.checks.sampled_tokens import against, part, reachable, sure
from instep.trace import seeded_coins
from instep.trace.event_rules import EventRules, verified
from instep.trace.policy import Arrival, read_policy
from instep.trace.seeded_coins import coins, murmur3
from instep_reference.acceptance import chain
from instep_reference.contract import engine as e
from instep_reference.contract.errors import BadInput
from instep_reference.contract.event_facts import Phase
from instep_reference.contract.sampling import UNIFORM, Sampling
from instep_reference.sampling import Drawing, drawn
from support.inputs.traces import header, policy, recorded
from support.running.covering import each_value

VOCAB, TREE = 50, (-1, 0, 0, 2, 2)
SAMPLINGS = (Sampling(1.0), Sampling(0.5, top_k=8), Sampling(1.7, top_p=0.7), Sampling(1.2, 20, 0.9))


def drawings(seed: int, parents: tuple[int, ...], count: int = 40) -> list[tuple[torch.Tensor, Drawing]]:
    dice = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        logits = torch.randn(len(parents), VOCAB, generator=dice, dtype=torch.float64) * 2
        tokens = logits[0].topk(6).indices[torch.randperm(6, generator=dice)][: len(parents)].tolist()
        uniforms = torch.rand(len(parents) + 1, generator=dice).tolist()
        made.append((logits, Drawing(SAMPLINGS[number % len(SAMPLINGS)], tokens, parents, uniforms)))
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("parents", "error"), each_value([TREE, chain(5)], [1e-6, 0.02, 0.4]))
def test_tokens_drawn_from_logits_within_the_error_are_reachable(parents: tuple[int, ...], error: float) -> None:
    """The bounds are sound: drawn from logits that are off, to the edge, no token is called wrong."""
    dice, moved = torch.Generator().manual_seed(9), 0
    for logits, drawing in drawings(3, parents):
        right = drawn(logits, drawing)
        for shape in (torch.rand(logits.shape, generator=dice, dtype=torch.float64) * 2 - 1,
                      torch.randn(logits.shape, generator=dice, dtype=torch.float64).sign()):  # fmt: skip
            own = drawn(logits + error * shape, drawing)
            moved += own != right
            parts = against(DrawnRow.every(logits, drawing), right, own, [error] * len(own), torch.float64)
            assert max(parts) <= 1.001, (drawing, own, right)
    assert moved or error < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("parents", [chain(5), TREE], ids=["chain", "tree"])
def test_a_token_of_another_uniform_is_not_reachable(parents: tuple[int, ...]) -> None:
    """And they are sharp: of all other tokens hardly any is granted, in fp32."""
    granted = total = 0
    for logits, drawing in drawings(4, parents, len(SAMPLINGS)):
        right = drawn(logits, drawing)
        for node, row in enumerate(logits):
            one = DrawnRow(row, drawing, node)
            assert one.drawn == right[node] and reachable(one, right[node], 0.0, torch.float32)
            for error in (1e-5, 0.3):
                others = [token for token in range(VOCAB) if token != right[node]
                          and reachable(one, token, error, torch.float32)]  # fmt: skip
                assert sure(one, error, torch.float32) == (not others)
                granted += len(others) * (error == 1e-5)
            total += VOCAB - 1
    assert granted <= total // 1000


def test_used_allowance_is_1_at_the_bound() -> None:
    """Two tokens of nearly one half each: with logits off by e the uniform decides otherwise within e / 2 around it."""
    logits = torch.tensor([0.0, 0.0], dtype=torch.float64)
    for off, right in ((0.5, 0.5), (1.0, 1.0), (2.0, 2.0)):
        e_ = 1e-3
        uniform = 1 / (1 + math.exp(-2 * e_ * off))  # of the first token once logits are off by so much
        row = DrawnRow(logits, Drawing.alone(Sampling(1.0), (uniform,)), 0)
        assert drawn(logits[None], row.drawing) == [1]
        assert part(row, 0, e_, torch.float64) == pytest.approx(right, rel=0.01)
    assert part(row, 7, 1e-3, torch.float64) == math.inf  # no such token


def test_drawn_requests_show_one_token_too_many_of_top_k() -> None:
    """Among 20 or 50 tokens a further one is almost never drawn."""
    shown = {}
    for sampling in filter(None, FUZZED):
        if sampling.top_k is not None:
            further = Sampling(sampling.temperature, sampling.top_k + 1, sampling.top_p)
            runs = [drawn(x, replace(one, sampling=sampling)) != drawn(x, replace(one, sampling=further))
                    for x, one in drawings(20, chain(5))]
            shown[sampling.top_k] = sum(runs)
    assert max(shown.values()) >= 10, shown


PROMPT = (5, 6, 7)


def begun(sampling: Sampling | None, *events: e.AnyEvent) -> EventRules:
    rules = EventRules(header())
    for event in (e.Admit("a", PROMPT, sampling), *events):
        rules.apply(event)
    return rules


WINDOW = (
    e.Forward((e.Row("a", "prefill", 3, root=4, uniforms=(0.5,)),)), e.Draft(("a",), picks=((4, 5, 6),)),
)  # fmt: skip


@pytest.mark.parametrize(("rules", "event", "says"), [
    (begun(Sampling(1.0)), e.Forward((e.Row("a", "prefill", 3, root=4),)),
     "rows[0].uniforms: found 0 numbers, expected 1, the final one: it samples"),
    (begun(Sampling(1.0)), e.Forward((e.Row("a", "prefill", 2, uniforms=(0.5,)),)), "0, as this row chooses nothing"),
    (begun(None), e.Forward((e.Row("a", "prefill", 3, root=4, uniforms=(0.5,)),)), "0, as it does not sample"),
    (begun(Sampling(0.0)), e.Forward((e.Row("a", "prefill", 3, root=4, uniforms=(0.5,)),)), "0, as it does not"),
    (begun(Sampling(1.0), *WINDOW), e.Forward((e.Row("a", "verify", uniforms=(0.5,) * 4),)),
     "found 4 numbers, expected 5, one per node and the final one"),
    (begun(Sampling(1.0)), e.Forward((e.Row("a", "prefill", 3, root=4, uniforms=(1.0,)),)), "uniforms[0]: found 1.0"),
    (begun(Sampling(1.0)), e.Forward((e.Row("a", "prefill", 3, root=4, uniforms=(0.1,)),)), "a multiple of 2**-24"),
    (begun(None), e.Admit("b", PROMPT, Sampling(-1.0)), "sampling.temperature: found -1.0, expected 0, or 0.001 to 1"),
    (begun(None), e.Admit("b", PROMPT, Sampling(math.nan)), "sampling.temperature: found nan"),
    (begun(None), e.Admit("b", PROMPT, Sampling(1.0, top_k=0)), "sampling.top_k: found 0, expected at least 1"),
    (begun(None), e.Admit("b", PROMPT, Sampling(1.0, top_p=0.0)), "sampling.top_p: found 0.0, expected at least 1.17"),
    (begun(None), e.Admit("b", PROMPT, Sampling(1.0, top_p=1e-46)), "sampling.top_p: found 1e-46, expected at least "),
])  # fmt: skip
def test_refusal_names_its_reason(rules: EventRules, event: e.AnyEvent, says: str) -> None:
    with pytest.raises(BadInput) as refused:
        rules.check(event)
    assert says in str(refused.value) and "legal here" in str(refused.value)


def test_uniforms_that_are_due_are_taken() -> None:
    due = e.Forward((e.Row("a", "verify", uniforms=(0.0, 0.5, 0.25, 1 - UNIFORM, 0.125)),))
    assert begun(Sampling(1.0), *WINDOW, due).table.live["a"].phase is Phase.VERIFIED


def test_a_policy_draws_its_uniforms_from_its_seed(tmp_path: Path) -> None:
    """Each request by its own numbers; the same seed gives the same trace, and another one other tokens."""
    arrivals = (Arrival("a", "more", max_new=6, sampling=Sampling(2.0)), Arrival("b", "few", max_new=4))
    made = {}
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        (tmp_path / name).mkdir()
        told = policy(arrivals=arrivals, deeds=(), accept=(), steps=(), seed=seed, adaptive=None)
        made[name] = verified(recorded(tmp_path / name, told)).events
    assert made["one"] == made["again"] != made["other"]
    rows = [row for event in made["one"] if isinstance(event, e.Forward) for row in event.rows]
    assert {row.request for row in rows if row.uniforms} == {"a"}
    assert [event.sampling for event in made["one"] if isinstance(event, e.Admit)] == [Sampling(2.0), None]


@pytest.mark.parametrize(("seed", "length", "hashes"), [
    (0, 0, (2167721464, 10027521, 2423355346, 1368026766, 78347357)),
    (7, 12, (403230713, 2083681129, 1410622644, 2389117767, 379994940)),
    (7, 13, (1429954227, 260905261, 1356623083, 3292605322, 1750503139)),
    (2**40 + 5, 300, (250741222, 2148362229, 712634821, 1483866775, 3942116221)),
])  # fmt: skip
def test_coins_of_a_seed_are_those_of_sglang(seed: int, length: int, hashes: tuple[int, ...]) -> None:
    """The hashes are those of `murmur_hash32_kernel` of the wheel 0.5.23, run in Triton's interpreter."""
    assert tuple(murmur3((seed & 0xFFFFFFFF, seed >> 32, length, column)) for column in range(5)) == hashes
    right = torch.tensor(hashes, dtype=torch.float64) / (2**32 - 1)
    theirs = right.float().clamp(max=1 - UNIFORM)
    found = torch.tensor(coins(seed, length, 4), dtype=torch.float64)
    assert torch.equal(found % UNIFORM, torch.zeros(5, dtype=torch.float64))
    assert torch.equal(found[theirs >= 0.5].float(), theirs[theirs >= 0.5])
    assert float((found - right).abs().max()) <= UNIFORM / 2


def test_a_coin_is_below_one_when_its_hash_is_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeded_coins, "murmur3", lambda words: 0xFFFFFFFF)
    assert coins(1, 1, 1) == (1 - UNIFORM, 1 - UNIFORM)


def test_uniforms_of_a_request_with_a_seed_depend_on_no_other_request(tmp_path: Path) -> None:
    """Next to another request, or after other numbers of the policy: same seed and lengths, same coins."""
    one, other = (Arrival(name, "more", max_new=6, sampling=Sampling(2.0), seed=7) for name in "ab")
    drawn = Arrival("b", "few", max_new=4, sampling=Sampling(1.0))
    found = []
    for name, arrivals in (("alone", (one,)), ("beside", (drawn, one)), ("twins", (other, one))):
        (tmp_path / name).mkdir()
        events = verified(recorded(tmp_path / name, policy(
            arrivals=arrivals, deeds=(), accept=(), steps=(), adaptive=None))).events
        rows = [row for event in events if isinstance(event, e.Forward) for row in event.rows if row.request == "a"]
        found.append({row.uniforms for row in rows if row.uniforms})
    assert found[0] == found[1] == found[2] and len(found[0]) > 2
    assert coins(7, 9, 4) not in (coins(7, 10, 4), coins(8, 9, 4))


@pytest.mark.parametrize(("fields", "says"), [
    ({"seed": 7}, "found 7, expected a number from 0"),
    ({"seed": -1, "sampling": {"temperature": 1.0}}, "found -1, expected a number from 0 to below 2"),
])  # fmt: skip
def test_a_seed_without_sampling_or_out_of_range_is_refused(
    tmp_path: Path, fields: dict[str, Any], says: str
) -> None:
    written = msgspec.to_builtins(policy())
    written["arrivals"] = [{"request": "a", "prompt": "few", **fields}]
    (tmp_path / "p.json").write_bytes(msgspec.json.encode(written))
    with pytest.raises(BadInput, match=r"p\.json: arrivals\[0\]\.seed") as refused:
        read_policy(tmp_path / "p.json")
    assert says in str(refused.value)
