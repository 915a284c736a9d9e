"""Mistakes inside one op: each is planted in a kernel's text and named by `instep op`, by the kit and by a replay.

Also formulas of explanations that need no run. Leaves out: explanations of other ops and memory (`test_diagnose.py`).
"""

import re
from collections.abc import Iterable
from dataclasses import make_dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep import kit
from instep.checks.grown_trees import MISTAKES as TREES
from instep.checks.wrong_state_bank import BANK
from instep.diagnose.mistakes import CATALOGUE as EVERY
from instep.diagnose.mistakes import (
    constants,
    experts,
    explanation_fit,
    fitted_constants,
    norms,
    rotary_and_visible_positions,
    selective_states,
    wrong_rows,
)
from instep.diagnose.mistakes.delta_rule import MISTAKES as CATALOGUE
from instep.diagnose.mistakes.delta_rule import candidates, listed
from instep.diagnose.mistakes.delta_rule_with_hooks import Call, walk
from instep.diagnose.mistakes.finding_case import Compared
from instep.diagnose.mistakes.step_controller import RULES
from instep.diagnose.mistakes.transformed_tensors import appearance
from instep.diagnose.mistakes.wrong_labels import heads
from instep.finding_problem import Explained, Unexplained
from instep.oracle.single_layer_run import LayerWork
from instep_reference.contract.declared_rounding import SCALED_STATE
from instep_reference.contract.place_names import AFTER_LAYERS, Place
from instep_reference.norms import L2_EPS
from instep_reference.weights import GdnWeights, LatentWeights
from support.running.command import Runner
from support.running.covering import WHOLE, few
from support.wrong.delta_rules import MISTAKES, RAW_MISTAKES, UNKNOWN, dense_ops, raw_ops

pytestmark = pytest.mark.slow

LAUNCHES = ("snapshots-r2-VK-float32", "prefill-r2-VK-float32")  # 4 value heads for 2 key heads
REPLAYED = ("gate before, or its own", "decay last", "state in bf16", "q not normalised", "two at once")


def launches(*names: str) -> list[kit.Case]:
    return [kit.op_cases("gdn", case=name)[0] for name in names or LAUNCHES]


def mistakes(findings: Any) -> set[Explained | Unexplained | None]:
    """What accounts for the findings of the rule itself, and not for what follows from them."""
    rule = [found.problem for found in findings if found.place.component in ("core", "state")]
    return {problem.mistake or problem.unexplained for problem in rule}


@few(6)
@pytest.mark.parametrize(("edits", "says"), MISTAKES.values(), ids=MISTAKES)
def test_the_kit_names_a_mistake_of_the_rule(edits: list[tuple[str, str]], says: str) -> None:
    found = kit.served(launches(), dense_ops(edits))
    named = mistakes(found.verdict.findings)
    assert named and all(isinstance(one, Explained) and says in one.says for one in named), named
    assert says in found.message and "unexplained" not in found.message


def replays(names: Iterable[str]) -> Any:
    return pytest.mark.parametrize("name", [
        name if name in REPLAYED else pytest.param(name, marks=WHOLE) for name in names])


@replays(MISTAKES)
def test_a_replay_names_a_mistake_of_the_rule(name: str) -> None:
    edits, says = MISTAKES[name]
    run = kit.replayed(kit.small(), dense_ops(edits), strategy="lazy_rerun", until=2)
    first = run.findings[0]
    assert first.explained is not None and first.explained.by == "hypothesis", run.message
    assert says in first.explained.says


@few(2)
@pytest.mark.parametrize(("edits", "says"), RAW_MISTAKES.values(), ids=RAW_MISTAKES)
def test_a_missing_norm_or_scale_of_a_raw_kernel_is_named(edits: list[tuple[str, str]], says: str) -> None:
    assert kit.served(launches(), raw_ops()).exit is kit.Exit.AGREED
    found = kit.served(launches(), raw_ops(edits))
    assert {one.says for one in mistakes(found.verdict.findings)} == {says}, found.message


@replays(RAW_MISTAKES)
def test_a_replay_names_a_missing_norm_or_scale_of_a_raw_kernel(name: str) -> None:
    edits, says = RAW_MISTAKES[name]
    run = kit.replayed(kit.small(), raw_ops(edits), strategy="snapshot", until=2)
    assert run.findings[0].explained.says == says, run.message


@few(3)
@pytest.mark.parametrize("edits", UNKNOWN.values(), ids=UNKNOWN)
def test_a_mistake_without_an_entry_is_not_named(edits: list[tuple[str, str]]) -> None:
    found = kit.served(launches(), dense_ops(edits))
    assert mistakes(found.verdict.findings) == {Unexplained()}, found.message


@replays([name for name in UNKNOWN if name != "recall added"])  # which is one slip in the reference's own formula
def test_a_replay_does_not_name_a_mistake_without_an_entry(name: str) -> None:
    run = kit.replayed(kit.small(), dense_ops(UNKNOWN[name]), strategy="lazy_rerun", until=2)
    first = run.findings[0].problem
    assert first.mistake is None and first.unexplained == Unexplained(), run.message


@pytest.mark.whole
def test_a_replay_names_one_slip_in_the_formula_of_the_rule() -> None:
    run = kit.replayed(kit.small(), dense_ops(UNKNOWN["recall added"]), strategy="lazy_rerun", until=2)
    assert "is made with `writing * value + recalled`" in run.findings[0].explained.says, run.message


def test_a_mistake_in_the_window_kernel_alone_is_named() -> None:
    edits, says = MISTAKES["beta h % H"]
    run = kit.replayed(kit.small(), dense_ops(edits, chunk=()), strategy="lazy_rerun", layers=[0])
    assert run.findings[0].event > 2 and says in run.findings[0].explained.says


def test_a_right_kernel_and_another_order_of_sums_agree() -> None:
    other = [('torch.einsum("hk,hkv->hv", k[row], S)', "(k[row][:, :, None] * S).flip(1).sum(1)")]
    for edits in ([], other):
        assert kit.served(launches(), dense_ops(edits)).exit is kit.Exit.AGREED


def test_mistakes_that_fit_equally_are_listed() -> None:
    """Launches of one row per sequence cannot tell a gate that is masked away from a gate that is left out."""
    found = kit.served(launches("decode-r1-KV-float32"), dense_ops(MISTAKES["gate before, or none"][0]))
    (one,) = mistakes(found.verdict.findings)
    assert isinstance(one, Unexplained) and one.fitting == len(one.names) == 2
    assert all(says in found.message for says in (
        "2 explanations fit equally well", "the gate of row t - 1 is used for row t", "the decay is missing"))


def test_a_mistake_must_account_for_launches_that_agree_too() -> None:
    """In these launches one request of several decays twice."""
    edits = UNKNOWN["some decays twice"]
    found = kit.served(launches("decode-r1-KV-float32"), dense_ops(edits))
    assert found.verdict.findings and mistakes(found.verdict.findings) == {Unexplained()}


def test_the_command_prints_the_sentence(instep: Runner) -> None:
    done = instep("op", "support.wrong.delta_rules:STALE_GATE", "gdn", "--case", "chunk-r2-KV-float32")
    assert done.code == 1 and "the gate of row t - 1 is used for row t; relative error" in " ".join(done.out.split())
    assert instep("op", "support.wrong.delta_rules:RIGHT", "gdn", "--case", "chunk-r2-KV-float32").code == 0


# -- the catalogue -------------------------------------------------------------------------------------


def sample(seed: int = 0) -> Call:
    draw = torch.Generator().manual_seed(seed)
    n, H, HV, K, V = 5, 2, 4, 4, 6

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(normal(n, H, K), dim=-1) for _ in range(2))
    rows = {"q": q * K**-0.5, "k": k, "v": normal(n, HV, V), "log_decay": -normal(n, HV).exp(),
            "beta": normal(n, HV).sigmoid()}  # fmt: skip
    near = {name: x[0] for name, x in rows.items()}
    return Call(**rows, state=normal(HV, K, V), raw={"q": 3 * q, "k": 2 * k}, before=[near], after=[near],
                others=[('of request "b"', {name: x.flip(0) for name, x in rows.items()})],
                launched_before=[{name: x.flip(0) for name, x in rows.items()}])  # fmt: skip


def test_a_name_in_the_catalogue_of_all_families_has_one_sentence() -> None:
    assert len(EVERY) > 150 and {one.name for one in (*CATALOGUE, *BANK, *RULES, *TREES)} <= EVERY.keys()
    assert all(EVERY[one.name].sentence == one.sentence for one in (*CATALOGUE, *BANK, *RULES, *TREES))
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in EVERY)


def test_every_mistake_has_its_own_name_and_sentence_and_changes_something() -> None:
    assert len({one.name for one in CATALOGUE}) == len({one.sentence for one in CATALOGUE}) == len(CATALOGUE)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", one.name) for one in CATALOGUE)
    changed = set[str]()
    of_channels = sample()
    of_channels = Call(**{name: getattr(of_channels, name) for name in ("q", "k", "beta")}, v=of_channels.v[..., :4],
                       log_decay=of_channels.v[..., :4].sigmoid().log(), state=of_channels.state[..., :4])
    without = replace(sample(), recalls=False, skip=torch.ones(4, dtype=torch.float64))
    for call in (sample(), without, of_channels, replace(sample(), beta=2 * sample().beta, stored=SCALED_STATE)):
        right = walk(call)
        for one in candidates(call, listed(call)):
            differ = [not torch.equal(x, y) for x, y in zip(one.walked, right, strict=True)]
            if any(differ):
                changed.add(one.mistake.name)
            assert "{" not in one.sentence
    assert {one.name for one in CATALOGUE} == changed


def test_the_right_recurrence_of_the_catalogue_is_that_of_the_reference() -> None:
    from instep_reference import gdn

    call = sample()
    q, k = (x.repeat_interleave(2, dim=1)[None] for x in (call.q, call.k))
    decay, beta = call.log_decay[None, ..., None], call.beta[None, ..., None]
    for recalls in (True, False):
        due = gdn.recur(q, k, call.v[None], decay, beta * recalls, beta, call.state[None])
        done = walk(replace(call, recalls=recalls))
        for found, right in ((done.core, due.out[0]), (done.update, due.update[0]), (done.states[-1], due.state[0])):
            torch.testing.assert_close(found, right)


# -- explanations of other results, each alone ---------------------------------------------------------


def test_labels_that_several_ranks_add_are_multiples() -> None:
    """Zeros of any sign are zeros, too."""
    right = torch.tensor([[7, 1 << 62], [-3, 5]])
    case: Any = SimpleNamespace(component="embedding", found=3 * right, right=right, granted=None,
                                context=SimpleNamespace(log=SimpleNamespace(poison=None)))  # fmt: skip
    assert [one.sentence for one in appearance(case) if explanation_fit.fit(case, one)] == [
        "is 3 times the right value, as if 3 ranks had added theirs"]
    case.found, case.right = torch.tensor([0.0, -0.0]), torch.tensor([1.0, 2.0])
    assert [one.sentence for one in appearance(case) if explanation_fit.fit(case, one)] == ["is all zero"]


def test_routing_weights_are_those_of_another_row_or_count() -> None:
    """3 rows with two of three experts each; the routing weights are halved."""
    scores = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 1.0], [2.0, 4.0, 3.0]], dtype=torch.float64)
    fields = {"experts_per_token": 2, "norm_topk": True, "routed_scale": 0.5, "experts": 3}
    mlp: Any = SimpleNamespace(router=torch.eye(3, dtype=torch.float64), bias=None)
    config = make_dataclass("Config", fields)(**fields)
    of = experts.Mixture(config, mlp, scores, scores, scores.argsort(descending=True))
    found, chances = dict(experts._weights(of)), scores.exp() / scores.exp().sum(-1, keepdim=True)
    ranks = [[0, 2, 1], [1, 2, 0], [1, 2, 0]]

    def weights(chosen: Any, share: Any, count: int = 2, normed: bool = True) -> torch.Tensor:
        """chosen, share: row -> the row whose experts, or whose routing weights, it has"""
        out = torch.zeros_like(scores)
        for row in range(3):
            its = chances[share(row), ranks[share(row)][:count]]
            out[row, ranks[chosen(row)][:count]] = 0.5 * (its / its.sum() if normed else its)
        return out

    def own(row: int) -> int:
        return row

    due = {"takes one expert too few": weights(own, own, 1), "takes one expert too many": weights(own, own, 3),
           "the routing weights of its experts are not renormalised": weights(own, own, normed=False)}  # fmt: skip
    for step, word in ((-1, "before"), (1, "after")):
        def other(row: int, step: int = step) -> int:
            return (row + step) % 3

        due |= {f"goes to the experts of the row {word}, with its own routing weights": weights(other, own),
                f"goes to the experts of the row {word}, with the routing weights of that row": weights(other, other),
                f"has the routing weights of the row {word}": weights(own, other)}  # fmt: skip
    assert all(torch.allclose(found[says], made) for says, made in due.items())
    assert torch.allclose(found["all its experts have the same routing weight"], (weights(own, own) > 0).double() / 2)


def test_only_other_thetas_are_tried() -> None:
    config = make_dataclass("Config", ["rope_theta", "rotary_dim", "latent", "head_dim"])(10000.0, 4, 0, 4)
    rows = torch.zeros(2, 1, 4, dtype=torch.float64)
    case: Any = SimpleNamespace(right=rows, component="query", made=lambda says, weights: [(says, weights.config)],
                                weights=make_dataclass("Weights", ["config"])(config))  # fmt: skip
    tried = [one for one in rotary_and_visible_positions._turned(case, LayerWork("trunk", 0, rows, 3))
             if isinstance(one, tuple) and "theta" in one[0]]  # fmt: skip
    assert {one.rope_theta for _, one in tried} == {*rotary_and_visible_positions.THETAS} - {10000.0}
    assert all(says == f"is rotated with a theta of {one.rope_theta:g}; it is 10000" for says, one in tried)


def test_experts_are_ranked_in_groups_by_their_scores_and_biases() -> None:
    """Two groups of three experts, of which a row takes two of one group; all biases are far below zero."""
    router, x = (torch.randn(n, 2, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (6, 3))
    bias = torch.tensor([-3.0, -9, -4, -3.2, -3.4, -8], dtype=torch.float64)
    fields = {"expert_groups": 2, "groups_per_token": 1, "experts": 6, "norm_topk": True, "routed_scale": 2.0}
    config: Any = make_dataclass("Config", fields)(**fields)
    scores = x @ router.T
    of: Any = SimpleNamespace(config=config, top=2, x=x, scores=scores, mlp=SimpleNamespace(router=router))
    of.weighed = lambda share, ranking: torch.zeros_like(scores).scatter(-1, ranking[:, :2], share)
    found, opened = dict(experts._by_sigmoid(of, bias)), 1 / (1 + (-scores).exp())

    def weights(chances: torch.Tensor, ranks: Any, pick: Any, scale: float = 2.0) -> torch.Tensor:
        """pick: the ranks of a group's experts -> the rank of the group"""
        out = torch.zeros_like(scores)
        for row in range(3):
            groups = [[n for n in range(6) if n // 3 == group] for group in range(2)] if pick else [[*range(6)]]
            best = max(groups, key=lambda group: pick([*map(float, ranks[row, group])], group, row) if pick else 0)
            two = sorted(best, key=lambda n: -float(ranks[row, n]))[:2]
            out[row, two] = scale * chances[row, two] / chances[row, two].sum()
        return out

    def usual(ranks: list[float], *more: Any) -> float:
        return sum(sorted(ranks)[-2:])

    both, soft = opened + bias, scores.softmax(-1)
    due = {
        "experts are chosen without the router's bias": weights(opened, opened, usual),
        "the routing weights contain the router's bias": weights(both, both, usual),
        "the router uses a softmax, not a sigmoid": weights(soft, soft + bias, usual),
        "the routing weights lack the scale of the configuration": weights(opened, both, usual, 1.0),
        "the routing weights have the scale of the configuration twice": weights(opened, both, usual, 4.0),
        "a group is ranked by its best expert alone": weights(opened, both, lambda ranks, *_: max(ranks)),
        "a group is ranked by all of its experts": weights(opened, both, lambda ranks, *_: sum(ranks)),
        "a group is ranked without the router's bias": weights(
            opened, both, lambda ranks, group, row: usual([*map(float, opened[row, group])])
        ),
        "experts of all groups are chosen": weights(opened, both, None),
    }
    last = found.pop("experts of other groups rank as 0")  # above all others, as their ranks are below zero
    assert found.keys() == due.keys() and all(torch.allclose(found[says], due[says]) for says in due)
    outside = (weights(opened, both, usual) == 0).view(3, 2, 3).all(-1, keepdim=True).expand(3, 2, 3).reshape(3, 6)
    assert torch.equal((last > 0).any(-1), torch.ones(3, dtype=torch.bool)) and not last[~outside].any()


def test_taps_of_queries_and_keys_are_exchanged_where_they_are_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "with_mixer", lambda case, says, layer, conv: [(says, conv.flatten().tolist())])
    none, conv = torch.zeros(0), torch.arange(5.0)[:, None]
    for q, k, v, taps in ((1, 1, 3, [1, 0, 2, 3, 4]), (2, 1, 2, None), (1, 3, 1, None)):
        config = SimpleNamespace(segments=[(1, width) for width in (q, k, v)])
        layer = SimpleNamespace(mixer=GdnWeights(none, none, none, none, conv, none, none, none, none))
        case: Any = SimpleNamespace(component="mixed", finding=SimpleNamespace(place=Place("trunk", 0, "mixed")),
                                    weights=SimpleNamespace(config=config, layers=[layer]))  # fmt: skip
        assert dict(constants._mixed(case)).get("is convolved with the taps of k for q, and of q for k") == taps  # type: ignore[call-overload, arg-type]


def test_the_eps_and_the_factor_of_wrong_rows_are_fitted() -> None:
    """Rows of other sizes that are normed with an eps of 0.5. One row of three is 1.5 times the right one."""
    x = torch.tensor([[1.0, 2.0], [0.1, 0.3], [3.0, 1.0]], dtype=torch.float64)
    for component, squares, eps in (("q", x.square().sum(-1), L2_EPS), ("normed", x.square().mean(-1), 1e-3)):
        right, found = (x / (squares + one).sqrt()[:, None] for one in (eps, 0.5))
        case: Any = SimpleNamespace(component=component, found=found, right=right, weights=SimpleNamespace(
            config=SimpleNamespace(eps=1e-3)))  # fmt: skip
        (one,) = fitted_constants._eps(case, x)
        assert one.sentence == f"is normed with an eps of 0.5; it is {eps:.2g}" and torch.allclose(one.wrong, found)
        case.found = right * 2  # as with an eps far below zero
        assert not [*fitted_constants._eps(case, x)]
    for factor, least, fitted in ((1.5, 0.16, 1.5), (1.5, 0.17, None)):  # from 3 times the allowed error on
        case = SimpleNamespace(component="hidden", right=x, found=x.clone(), granted=torch.tensor([[least], [1.0]]))
        case.found[1] *= factor
        found = [one.sentence for one in fitted_constants._factor(case)]
        assert found == [f"is {factor:g} times the right value"] * (fitted is not None)


def test_a_gated_norm_may_have_the_eps_of_the_others() -> None:
    x = torch.tensor([[1.0, 2.0], [0.1, 0.3]], dtype=torch.float64)
    mean = x.square().mean(-1, keepdim=True)
    for core_eps, named in ((0.25, True), (0.5, False)):
        config = SimpleNamespace(eps=0.5, core_eps=core_eps, row_norms=False, head_norms=True, centred_norms=False)
        case: Any = SimpleNamespace(component="gated", right=x / (mean + core_eps).sqrt(), piece=object(),
                                    weights=SimpleNamespace(config=config))  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(norms, "norm_input", lambda case: x)
            patch.setattr(norms, "_norm_weight", lambda case: None)
            for name in ("_neighbours", "_weights_of_others", "_of_other_columns"):
                patch.setattr(norms, name, lambda *given: iter(()))
            found = {one.sentence: one.wrong for one in norms.norms(case)}
        says = "is normed with the eps of the other norms"
        assert (says in found) is named and (not named or torch.allclose(found[says], x / (mean + 0.5).sqrt()))
        for eps, how in ((10 * core_eps, "with 10 times the eps"), (core_eps / 10, "with a tenth of the eps")):
            assert torch.allclose(found[f"is normed {how}"], x / (mean + eps).sqrt())
        assert torch.allclose(found["is normed with eps outside the root"], x / (mean.sqrt() + core_eps))


def test_a_norm_over_other_columns_is_named() -> None:
    """2 rows of 2 heads with 2 channels: the mean squares of the heads of the second row are 1 and 9."""
    x = torch.tensor([[[1.0, 1.0], [1.0, 1.0]], [[1.0, 1.0], [3.0, 3.0]]], dtype=torch.float64)
    case: Any = SimpleNamespace(component="gated", own={"core": x, "key_raw": x.flatten(1)}.get)
    for component, rows, says, squares in (
        ("gated", x, "over all heads of a row, not head by head", [[1, 1], [5, 5]]),
        ("gated", x.flatten(1), "head by head, not over all heads of a row", [[1, 1], [1, 9]]),
        ("value", x[:, 0], "over the latent and the shared key together", [1, 5]),
    ):
        case.component = component
        assert {one: made.tolist() for one, made in norms._of_other_columns(case, rows)} == {says: squares}


def test_a_slip_of_one_channel_in_bf16_is_no_other_column() -> None:
    """Each of 256 columns has one number in bf16, and many are near to another column's. Then two are exchanged."""
    right = torch.randn(1, 256, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    found, other = right.bfloat16(), right[:, [*range(40), 41, 40, *range(42, 256)]].bfloat16()
    found[:, 3] *= 1 + 2**-7
    place: Any = SimpleNamespace(place=Place("trunk", 0, "normed"))
    slip, moved = (Compared(place, one, right, torch.full((2, 1), 1e-6), once=True) for one in (found, other))
    assert explanation_fit.best(slip, wrong_rows.permuted(slip, 1, "column", [])) == (None, 0)  # type: ignore[arg-type]
    (says, _) = explanation_fit.best(moved, wrong_rows.permuted(moved, 1, "column", []))  # type: ignore[arg-type]
    assert says == "column 40 is that of column 41, column 41 is that of column 40"
    nearest = (found.double().T - right).abs().argmin(1)
    guess = explanation_fit.Explanation("is that of the nearest columns", right[:, nearest], 256.0**9)
    assert explanation_fit.fit(slip, guess) is None
    little = explanation_fit.Explanation("is scaled", right * (1 + 2**-11))  # one tensor, not the nearest of many
    assert explanation_fit.fit(replace(slip, found=little.wrong.bfloat16()), little) is not None


def test_wrong_scales_and_bounds_are_multiples_of_the_right_value() -> None:
    bound, rate, opened = -5.0, torch.tensor([0.5, 2.0]), torch.tensor([-1.0, 0.3])
    right = bound * torch.sigmoid(rate * opened)
    gates = {one.sentence: one.wrong for one in constants._of_bound(bound, rate, opened)}
    torch.testing.assert_close(gates["has the bound of the safe gate twice"], -bound * right)
    torch.testing.assert_close(gates["lacks the bound of the safe gate as a factor"], right / -bound)
    config = SimpleNamespace(recurrence=SimpleNamespace(inputs="normed"), key_dim=16)
    case = SimpleNamespace(weights=SimpleNamespace(config=config), right=torch.ones(1))
    scales = {one.sentence: float(one.wrong) for one in constants._q(case)}  # type: ignore[arg-type]
    assert scales == {"lacks the scale K^-1/2": 4.0, "has the scale K^-1/2 twice": 0.25}


def test_the_input_of_a_draft_head_with_its_halves_exchanged_is_explained() -> None:
    case = SimpleNamespace(right=torch.arange(6.0)[None])
    (one,) = constants._joined(case)  # type: ignore[arg-type]
    assert one.wrong.tolist() == [[3.0, 4.0, 5.0, 0.0, 1.0, 2.0]]


def test_the_input_of_a_key_norm_are_the_channels_of_keys() -> None:
    """2 heads of 3 channels of q, as many of k, and values."""
    mixed = torch.arange(40.0).view(2, 20)
    config = SimpleNamespace(key_heads=2, key_dim=3, recurrence=SimpleNamespace(inputs="normed"))
    case = SimpleNamespace(component="k", weights=SimpleNamespace(config=config), own=lambda name: mixed, piece=None,
                           finding=SimpleNamespace(place=Place("trunk", 0, "k")))  # fmt: skip
    found = norms.norm_input(case)  # type: ignore[arg-type]
    assert found is not None and found.tolist() == mixed[:, 6:12].view(2, 2, 3).tolist()


def test_parts_of_a_projection_are_confused_only_with_others_of_their_shape() -> None:
    qkv = torch.randn(3, 2, 9, generator=torch.Generator().manual_seed(5))
    config = SimpleNamespace(key_dim=2, value_dim=5, recurrence=SimpleNamespace(inputs="projected"))
    case = SimpleNamespace(component="q", weights=SimpleNamespace(config=config), own=lambda name: qkv,
                           right=torch.nn.functional.silu(qkv[..., :2]))  # fmt: skip
    said = {one.sentence for one in constants._q(case)}  # type: ignore[arg-type]
    assert {one for one in said if "part of" in one} == {"is made of the part of k"}


def test_the_last_layer_before_a_final_norm_is_its_input() -> None:
    place = Place("trunk", AFTER_LAYERS, "final")
    hidden = {layer: torch.full((2, 4), layer + 1.0) for layer in range(2)}
    pieces = [SimpleNamespace(stage="trunk", layer=layer, request="a", own={layer: hidden.get(layer)},
                              place=lambda name, layer=layer: layer) for layer in (0, 1, AFTER_LAYERS)]  # fmt: skip
    case = SimpleNamespace(pieces=pieces, finding=SimpleNamespace(place=place, request="a"))
    found = norms._before_final(case)  # type: ignore[arg-type]
    assert found is not None and torch.equal(found, hidden[1].double())


def test_the_label_of_a_row_is_its_first_one() -> None:
    assert heads(torch.tensor([[[3], [9]], [[-1], [2]]])) == [3, (1 << 64) - 1] and heads(torch.empty(0, 2)) == []


def test_mistakes_of_a_layer_of_one_block_are_those_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = SimpleNamespace(mixer=None)
    weights = SimpleNamespace(layers=[layer], draft=SimpleNamespace(layers=[layer]), config=SimpleNamespace(
        recurrence=SimpleNamespace(inputs="normed"), layers=[("mlp",)]))  # fmt: skip
    monkeypatch.setattr(selective_states, "_of_one_block", lambda case: iter(["its own"]))
    for stage, made in (("trunk", ["its own"]), ("extend", [])):
        finding = SimpleNamespace(place=Place(stage, 0, "hidden"))
        case = SimpleNamespace(piece=object(), weights=weights, finding=finding)
        assert [*selective_states.selective(case)] == made  # type: ignore[arg-type]


def test_the_weight_of_a_norm_is_that_of_its_layer() -> None:
    """A layer of latent attention: only its value is normed by the norm of latents."""
    none = torch.zeros(0)
    layer = SimpleNamespace(mixer=LatentWeights(none, none, torch.ones(3), none, none), input_norm=torch.ones(5),
                            post_norm=torch.ones(7))  # fmt: skip
    weights = SimpleNamespace(layers=[layer], draft=None, final_norm=torch.ones(9))
    for component, width in (("value", 3), ("normed", 5), ("post_normed", 7)):
        case = SimpleNamespace(weights=weights, component=component,
                               finding=SimpleNamespace(place=Place("trunk", 0, component)))  # fmt: skip
        weight = norms._norm_weight(case)  # type: ignore[arg-type]
        assert weight is not None and weight.numel() == width


@pytest.mark.parametrize(("component", "eps", "squares"), [("normed", 0.25, 1.0), ("q", L2_EPS, 4.0)])
def test_mistakes_of_a_norm_scale_rows_of_zeros_by_its_eps(
    monkeypatch: pytest.MonkeyPatch, component: str, eps: float, squares: float
) -> None:
    """Rows of zeros and of ones, 4 wide. squares: the mean of the squares of ones; for q their sum"""
    x = torch.tensor([[0.0] * 4, [1.0] * 4], dtype=torch.float64)
    config = SimpleNamespace(eps=eps, core_eps=eps, row_norms=False, centred_norms=False)
    layer = SimpleNamespace(mixer=None, input_norm=None, post_norm=None)
    case = SimpleNamespace(component=component, right=torch.ones(2, 1, dtype=torch.float64), piece=object(),
                           finding=SimpleNamespace(place=Place("trunk", 0, component)),
                           weights=SimpleNamespace(config=config, layers=[layer], draft=None))  # fmt: skip
    monkeypatch.setattr(norms, "norm_input", lambda case: x)
    monkeypatch.setattr(norms, "_neighbours", lambda *given: iter(()))
    made = {one.sentence: one.wrong[:, 0].tolist() for one in norms.norms(case)}  # type: ignore[arg-type]
    right, other = (eps**0.5, (squares + eps) ** 0.5), "mean" if component == "normed" else "sum"
    for says, roots in {"is normed with 10 times the eps": ((10 * eps) ** 0.5, (squares + 10 * eps) ** 0.5),
                        "is normed with a tenth of the eps": ((eps / 10) ** 0.5, (squares + eps / 10) ** 0.5),
                        "is normed with eps outside the root": (eps, squares**0.5 + eps),
                        "is not normed at all": (1, 1),
                        f"is normed by the {other} of the squares, without the root": (eps, squares + eps)}.items():
        assert made[says] == pytest.approx([one / root for one, root in zip(right, roots, strict=True)]), says
