"""Formulas of explanations, each alone on small numbers; and parts of the search for causes.

Leaves out: mistakes that are planted in kernels and engines (`test_mistakes.py`, `test_diagnose.py`).
"""

import math
from collections.abc import Iterable
from dataclasses import fields, make_dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.checks import for_labels
from instep.checks.earlier_rounds import EarlierRounds
from instep.checks.grown_trees import Scores
from instep.checks.one_sided_errors import FEWEST_SAMPLES, LOOKS, Samples
from instep.checks.sampled_tokens import Row, reachable
from instep.diagnose import RunHistory, explained
from instep.diagnose.mistakes import (
    constants,
    explanation_fit,
    fitted_constants,
    norms,
    residual_streams,
    rotary_and_visible_positions,
    transformed_tensors,
    wrong_inputs,
)
from instep.diagnose.mistakes.experts import Mixture
from instep.diagnose.mistakes.finding_case import Compared, Explanation
from instep.diagnose.mistakes.rotary_and_visible_positions import THETAS
from instep.diagnose.mistakes.wrong_labels import heads, undone
from instep.oracle import miscounted_states
from instep.oracle.single_layer_run import LayerWork
from instep.watch.event_context import EventContext
from instep.watch.memory_changes import pattern
from instep_reference.attention import AttentionMemory
from instep_reference.contract.declared_rounding import Blocked
from instep_reference.contract.engine import Forward
from instep_reference.contract.place_names import STAGE_LEVEL, Place
from instep_reference.contract.sampling import Sampling
from instep_reference.label_ledger import code, expand
from instep_reference.label_mixing import MASK, mix
from instep_reference.weights import AttentionWeights, LatentWeights, fixed_decay
from support.inputs import check_contexts
from support.running.covering import few


def value(**given: Any) -> Any:
    """A frozen value of these fields, for code that replaces some of them."""
    return make_dataclass("Value", given)(**given)


def named_tensors(found: Iterable[Any]) -> dict[str, torch.Tensor]:
    return {one.sentence: one.wrong for one in found}


def test_a_factor_is_fitted_to_the_wrong_blocks_alone() -> None:
    """4 rows: right, off by less than the allowance, and twice the right value; large rows hide no small one."""
    right = torch.tensor([[4.0] * 8, [2.0] * 8, [0.5] * 8, [0.25] * 8], dtype=torch.float64)
    found = right * torch.tensor([[1.0], [1 + 1e-4], [2.0], [2.0]])
    case = SimpleNamespace(component="hidden", found=found, right=right,
                           granted=torch.tensor([[1e-3, 1e-9], [1e-4, 1e-4]]))  # fmt: skip
    (one,) = fitted_constants._factor(case)  # type: ignore[arg-type]
    assert one.sentence == "is 2 times the right value" and torch.equal(one.wrong, 2 * right)
    near = SimpleNamespace(component="hidden", found=right * (1 + 1e-4), right=right, granted=case.granted)
    assert not [*fitted_constants._factor(near)]  # type: ignore[arg-type]


def test_entries_with_other_scales_are_multiples_of_the_right_ones() -> None:
    """Each entry has its own factor. Numbers that differ otherwise, or in too few numbers, are no sign of scales."""
    right = torch.randn(3, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    right[..., 3] = 0
    narrow = Blocked(torch.float8_e4m3fn, (1, None))

    def said(found: torch.Tensor, right: torch.Tensor, stored: Any = narrow) -> list[str]:
        case: Any = SimpleNamespace(granted=None, component="keys", found=found, right=right,
                                    oracle=SimpleNamespace(rounds={"keys": stored}))  # fmt: skip
        return [one.sentence for one in fitted_constants.scales_of_entries(case)]

    scaled = right.clone()
    scaled[1] *= torch.tensor([0.5, 1.25])[:, None]
    assert said(scaled, right) == [
        "is read with other scales: the numbers of each entry are 0.5 to 1.25 times the right ones"]
    noise = torch.randn(right.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert not said(right + 0.01 * noise, right) and not said(-scaled, right)
    assert not said(scaled * torch.tensor([1, -1])[:, None], right), "the factors of one head are below 0"
    assert not said(torch.cat((right[:1] + 0.01 * noise[:1], scaled[1:])), right), "one token differs otherwise"
    assert not said(scaled[..., :4], right[..., :4]) and not said(scaled, right, torch.float32)  # there are no scales


def test_tensors_are_the_same_up_to_the_rounding_of_fp64() -> None:
    one = torch.tensor([1.0, 1e-9], dtype=torch.float64)
    assert explanation_fit._same(one, one * (1 + 1e-13)) and explanation_fit._same(one, one + 1e-13)
    assert not explanation_fit._same(one, one + torch.tensor([1e-9, 0.0])) and not explanation_fit._same(one, one / 0)


def test_wrong_reads_of_streams_are_made_of_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of two streams with two channels, normed to 1 and -1 in the first, and to 1 in both of the second.

    Without weights each share is a half. The strength is made of a quarter of the sum of all channels.
    """
    zero = torch.zeros(1, 4, dtype=torch.float64)
    weights = SimpleNamespace(norm=torch.zeros(4), down=zero, up=zero.T, inject=zero + 0.25)
    x = torch.tensor([[1.0, -1.0, 2.0, 2.0]], dtype=torch.float64)
    monkeypatch.setattr(residual_streams, "_read_by", lambda case: (x, weights))
    case: Any = SimpleNamespace(weights=SimpleNamespace(config=SimpleNamespace(eps=0.0, streams=2)),
                                right=torch.tensor([[1.0, 5.0]]))  # fmt: skip
    normed = named_tensors(residual_streams._normed(case))
    assert normed["is the mean of the streams: nothing mixes them"].tolist() == [[1, 0]]
    assert normed["is the sum over the streams, not their mean"].tolist() == [[1, 0]]
    assert normed["is mixed by shares without silu"].tolist() == [[0.5, 0]]
    assert normed["is the normed stream 1 alone"].tolist() == [[1, 1]]
    strength = named_tensors(residual_streams._strength(case))
    for says, factor, inner in (("lacks the factor 2", 1, 0.25), ("is made of streams that are not normed", 2, 0.5),
                                ("is not divided by the number of streams inside", 2, 0.5)):  # fmt: skip
        assert strength[says].item() == pytest.approx(factor / (1 + math.exp(-inner))), says
    assert strength["is that of the stream before"].tolist() == [[5, 1]]


def test_wrong_views_of_a_cache_are_made_of_its_rows() -> None:
    """Attention over 3 earlier positions."""
    keys = torch.tensor([[1.0], [2.0], [3.0]])
    seen = dict[str, tuple[list[float], list[float]]]()
    case = SimpleNamespace(made=lambda says, memory: seen.update({says: (memory.keys[:, 0].tolist(),
                                                                         memory.values[:, 0].tolist())}) or (),
                           context=SimpleNamespace(subject=SimpleNamespace(before={})),
                           finding=SimpleNamespace(place=Place("trunk", 0, "attended")))  # fmt: skip
    work = LayerWork("trunk", 0, torch.zeros(1, 1), 3, AttentionMemory(keys, 10 * keys))
    assert not [*rotary_and_visible_positions._seen(case, work)]  # type: ignore[arg-type]
    assert seen["sees nothing from before these rows"] == ([], [])
    assert seen["does not see the last position before these rows"] == ([1, 2], [10, 20])
    assert seen["does not see the first 2 positions"] == ([3], [30])
    assert seen["sees the last position before these rows twice"] == ([1, 2, 3, 3], [10, 20, 30, 30])
    assert seen["sees one position more, which is empty"] == ([1, 2, 3, 0], [10, 20, 30, 0])
    assert seen["reads keys and values one position too late"] == ([2, 3, 1], [20, 30, 10])
    assert seen["reads values one position too late, with the right keys"] == ([1, 2, 3], [20, 30, 10])


def test_mistakes_of_scores_scale_the_query() -> None:
    """Heads of 4 channels."""
    made = dict[str, float]()
    config = SimpleNamespace(head_dim=4)
    case = SimpleNamespace(own=lambda name: torch.ones(1), weights=SimpleNamespace(config=config, layers=[]),
                           made=lambda says, changes: made.update({says: float(changes["query"])}) or (),
                           finding=SimpleNamespace(place=Place("trunk", 0, "attended")))  # fmt: skip
    assert not [*constants._attended(case)]  # type: ignore[arg-type]
    log2 = 1 / math.log(2)
    assert made == {"the scores are not scaled by head_dim^-1/2": 2.0, "the scores are scaled twice": 0.5,
                    "the softmax is in powers of 2, not of e": pytest.approx(1 / log2),
                    "the softmax takes log2(e) twice": pytest.approx(log2)}  # fmt: skip


def test_a_layer_norms_results_if_its_kind_does() -> None:
    config = SimpleNamespace(mixers=["gdn", "attention"], norm_after={"attention"})
    for stage, layer, normed in (("trunk", 0, False), ("trunk", 1, True), ("extend", 1, False)):
        case = SimpleNamespace(weights=SimpleNamespace(config=config),
                               finding=SimpleNamespace(place=Place(stage, layer, "mixer")))  # fmt: skip
        assert constants._norms_results(case) is normed  # type: ignore[arg-type]


def test_norms_over_all_heads_are_confused_with_those_of_each_head() -> None:
    """2 rows of 2 heads with 2 channels; the weight of a channel is its number, from 1."""
    none, weight = torch.zeros(0), torch.arange(4.0, dtype=torch.float64)
    mixer = AttentionWeights(**{field.name: none for field in fields(AttentionWeights)})
    mixer = replace(mixer, query_norm=weight, key_norm=10 + weight)
    x = torch.tensor([[[3.0, 3.0], [1.0, 1.0]], [[2.0, 2.0], [4.0, 4.0]]], dtype=torch.float64)
    for component, of in (("query", 1 + weight), ("key", 11 + weight)):
        case = SimpleNamespace(component=component, weights=SimpleNamespace(layers=[SimpleNamespace(mixer=mixer)]),
                               finding=SimpleNamespace(place=Place("trunk", 0, component)))  # fmt: skip
        made = named_tensors(norms._of_rows(case, x, 0.0))  # type: ignore[arg-type]
        w, rows = of.view(2, 2), torch.tensor([5.0, 10.0]).sqrt().double()[:, None, None]
        assert torch.equal(made["is normed head by head, not over all heads of a row"], w.expand(2, 2, 2))
        assert torch.allclose(made["is scaled with the weights of the first head"], x / rows * w[0])
        assert torch.allclose(made["is scaled with the weights of the head before"], x / rows * w.flip(0))
        assert torch.allclose(made["is normed with the root mean square of the row after"], x / rows.flip(0) * w)
        made = named_tensors(norms._of_rows(case, x, 1.0))  # type: ignore[arg-type]
        assert torch.allclose(made["is normed with 10 times the eps"], x / (rows.square() + 10).sqrt() * w)


def compared(right: torch.Tensor, found: torch.Tensor, component: str = "hidden") -> Compared:
    """A finding whose rows may err by 1e-6."""
    finding: Any = SimpleNamespace(place=Place("trunk", 0, component))
    return Compared(finding, found, right, torch.full((2, 1), 1e-6, dtype=torch.float64))


def test_an_explanation_fits_if_it_accounts_for_every_wrong_cell() -> None:
    """2 rows of two cells of 8 columns; the mistake doubles a row."""
    right = torch.randn(2, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    doubled, part, other = Explanation("is doubled", 2 * right), right.clone(), right.clone()
    part[1, 8:] *= 2
    other[1] *= 3
    for found, says in ((2 * right, "is doubled"), (part, "is doubled, in row 1, in columns 8 to 15"), (other, None),
                        (right, None), (right * (1 + 1e-7), None)):  # fmt: skip
        fits = explanation_fit.fit(compared(right, found), doubled)
        assert (fits and fits.sentence) == says
    assert explanation_fit.fit(compared(right, 2 * right), doubled, tried=1e60) is not None
    one = torch.ones(1, 1, dtype=torch.float64)  # any explanation may fit a single number
    twice = Explanation("is doubled", 2 * one)
    assert explanation_fit.fit(compared(one, 2 * one, "hidden"), twice, tried=1.0) is not None
    assert explanation_fit.fit(compared(one, 2.001 * one), twice) is None
    near = replace(compared(one, 2.0004 * one), granted=torch.full((2, 1), 1e-3))  # as near as one number of 2,500
    for others, fit in ((0, True), (1, True), (2, False)):
        tried = [twice, *[Explanation("is zero", 0 * one)] * others]
        assert [found.sentence for found in explanation_fit.nearest(near, tried)] == ["is doubled"] * fit
    for wrong, right in ((2 * one, True), (3 * one, False), (2 * one[0], False), (one * math.nan, False)):
        assert explanation_fit.agrees(near, Explanation("another", wrong)) is right


def test_an_explanation_may_leave_the_whole_allowance(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.randn(2, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for left, fits in ((1.0, True), (1.0 + 1e-9, False), (math.nan, False)):
        monkeypatch.setattr(explanation_fit, "_explained_left", lambda *given, left=left: left)
        found = explanation_fit.fit(compared(right, 2 * right), Explanation("is doubled", 2 * right))
        assert (found is not None) is fits


def test_numbers_that_are_lost_must_be_lost_by_the_mistake_too() -> None:
    """A NaN, where the mistake has one, too; it may begin in 1,200 places, so one place is no coincidence."""
    right = torch.randn(600, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    lost, wrong, all_lost = right.clone(), 2 * right, torch.full_like(right, torch.nan)
    lost[0, 3], wrong[0, 3] = torch.nan, torch.nan
    mistake = Explanation("loses a number", lost)
    assert explanation_fit.fit(compared(right, lost), mistake) is not None
    assert explanation_fit.fit(compared(right, lost), mistake, tried=2.0) is None
    assert explanation_fit.fit(compared(right[:400], lost[:400]), Explanation("loses it", lost[:400])) is None
    assert explanation_fit.fit(compared(right, wrong), mistake) is None
    assert explanation_fit.fit(compared(right, wrong), Explanation("doubles, too", wrong)) is not None
    assert explanation_fit.fit(compared(right, all_lost), Explanation("loses all", all_lost)) is None


def test_wrong_parts_are_rows_heads_and_tiles_of_columns() -> None:
    matters = torch.ones(3, 2, 2, dtype=torch.bool)
    taken = torch.zeros_like(matters)
    taken[1:, 0, 1] = True
    where = explanation_fit.where
    assert where("core", taken, matters) == ", in rows 1, 2, in head 0, in columns 8 to 15"
    assert where("state", taken[:, 0], matters[:, 0]) == ", in heads 1, 2, in columns 8 to 15"
    assert where("keys", taken, matters).endswith(", in column 1") and where("core", matters, matters) == ""


def test_the_last_channels_of_latents_turn() -> None:
    """3 rows of 2 heads with 6 channels, of which the last 4 turn; and without latents the first 4."""
    right = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    for latent, kept in ((8, slice(0, 2)), (0, slice(4, 6))):
        config = value(rotary_dim=4, rope_theta=THETAS[0], latent=latent, head_dim=6)
        case = SimpleNamespace(right=right, component="key", weights=value(config=config), made=lambda *_, **more: ())
        work = LayerWork("trunk", 0, torch.zeros(3, 1), 5)
        turned = named_tensors(rotary_and_visible_positions._turned(case, work))  # type: ignore[arg-type]
        assert turned and "positions begin at 0 again" in turned
        for says, wrong in turned.items():
            assert torch.equal(wrong[..., kept], right[..., kept]), says
            assert torch.allclose(wrong.norm(dim=-1), right.norm(dim=-1)), says
        last = turned["all rows are at the position of the first"]
        assert torch.equal(last[0], right[0]) and not torch.equal(last[1], right[1])


def test_channels_of_latents_that_turn_are_stored_in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 heads of 6 channels and a gate; the last 4 channels turn, as the last 4 rows of `down` do."""
    none, made = torch.zeros(0), dict[str, list[float]]()
    query, down = (torch.arange(float(count))[:, None] for count in (14, 7))
    layer = SimpleNamespace(mixer=LatentWeights(query, down, none, none, none))
    config = SimpleNamespace(heads=2, head_dim=6, rotary_dim=4, latent=3)
    monkeypatch.setattr(rotary_and_visible_positions, "with_mixer", lambda case, says, layer, **changed: made.update(
        {name: tensor.flatten().tolist() for name, tensor in changed.items() if tensor.shape[1:] == (1,)}) or ())
    case = SimpleNamespace(weights=SimpleNamespace(config=config, layers=[layer]),
                           finding=SimpleNamespace(place=Place("trunk", 0, "projected")))  # fmt: skip
    assert not [*rotary_and_visible_positions._of_pairs(case)]  # type: ignore[arg-type]
    one = [0, 1, 2, 4, 3, 5, 6]
    assert made == {"query": one + [7 + number for number in one], "down": [0, 1, 2, 3, 5, 4, 6]}


def test_decays_of_other_heads_and_layers_are_those_of_the_formula() -> None:
    """2 rows of 3 heads in layer 1 of 4."""
    right = torch.tensor(fixed_decay(3, 1, 4), dtype=torch.float64).expand(2, 3)
    case = SimpleNamespace(right=right, finding=SimpleNamespace(place=Place("trunk", 1, "log_decay")))
    made = named_tensors(constants._fixed(case, 4))  # type: ignore[arg-type]
    assert {says for says in made if "of layer" in says} == {f"is that of layer {n}" for n in (0, 2, 3)}
    for says, layer in (("is that of layer 0", 0), ("is that of layer 3", 3)):
        assert made[says][1].tolist() == pytest.approx(fixed_decay(3, layer, 4))
    assert made["is the same in every layer"][1].tolist() == pytest.approx([-(2.0 ** (-8 * n / 3)) for n in (1, 2, 3)])


def test_a_norm_over_rows_takes_the_root_of_a_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 1 to 2 of a batch of 4 rows: the root mean squares are 1, 2, 3, 4."""
    rows = torch.arange(1.0, 5.0, dtype=torch.float64)[:, None].expand(4, 2)
    monkeypatch.setattr(norms, "row_spans", lambda context, stage: [SimpleNamespace(request="a", begin=1, count=2)])
    place = Place("trunk", 0, "post_normed")
    subject = SimpleNamespace(places={place._replace(component="residual"): rows})
    case = SimpleNamespace(component="post_normed", finding=SimpleNamespace(place=place, request="a"),
                           context=SimpleNamespace(subject=subject))  # fmt: skip
    found = dict(norms._neighbours(case, rows[1:3], torch.tensor([2.0, 3.0]), 0.0))  # type: ignore[arg-type]
    assert {says: one.tolist() for says, one in found.items()} == {
        "the row before it": [1, 2], "the row after it": [3, 4], "the first row": [2, 2]}  # fmt: skip
    found = dict(norms._neighbours(case, rows[1:3], torch.tensor([2.0, 3.0]), 3.0))  # type: ignore[arg-type]
    assert found["the row before it"].square().tolist() == pytest.approx([1 + 3, 4 + 3])


def test_inputs_are_replaced_by_multiples_and_by_rows_of_their_shape() -> None:
    own = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert [one.tolist() for _, one in wrong_inputs._replaced("k", own)] == [
        [[0, 0], [0, 0]], [[2, 4], [6, 8]], [[0.5, 1], [1.5, 2]], [[-1, -2], [-3, -4]]]  # fmt: skip
    others = {"of b": torch.tensor([[5.0, 6.0]]), "of c": torch.zeros(2, 3)}
    case = SimpleNamespace(others=lambda name: others.items())
    moved = dict(wrong_inputs._moved(case, "hidden", own))  # type: ignore[arg-type]
    assert "the hidden of c" not in moved and moved["the hidden of b"].tolist() == [[5, 6], [5, 6]]
    assert moved["the hidden of the row before"].tolist() == [[3, 4], [1, 2]]


def test_rows_that_a_request_has_itself_are_not_another_requests() -> None:
    """Two requests begin with the same token, so the first row of one is that of the other, too."""
    own = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0)).double()
    theirs = {"b": own[:1] * (1 + 1e-7), "c": own[:1] + 1}
    case: Any = SimpleNamespace(others=lambda name: ((f'of request "{one}"', x) for one, x in theirs.items()))
    found = dict(wrong_inputs._moved(case, "value", own))
    assert 'the value of request "b"' not in found and 'the value of request "c"' in found
    first, case.component = found["the value of the first row for every row"], "attended"
    for start, rows in ((0, first), (2, first), (0, own)):
        case.piece = SimpleNamespace(span=SimpleNamespace(start=start))
        assert bool(wrong_inputs._or_seen_alone(case, "value", rows)) is (not start and torch.equal(rows, own[[0] * 3]))


def test_narrow_numbers_may_err_by_the_largest_allowance() -> None:
    """Two rows, of 1 and of 64, in bfloat16; a number is off by more than its rounding, and within the allowance."""
    right = torch.full((2, 8), 1 + 1 / 512, dtype=torch.float64)
    right[1] = 64 + 1 / 8
    for granted, right_one in (([1e-9, 1e-3], True), ([1e-9, 1e-9], False)):
        found = right.bfloat16().float()
        found[0] += 1 / 64
        case = SimpleNamespace(component="hidden", found=found, right=right,
                               granted=torch.tensor([[1e-9] * 2, granted]))  # fmt: skip
        named = [one.sentence for one in transformed_tensors._narrowed(case)]  # type: ignore[arg-type]
        assert named == ["as if stored in bfloat16"] * right_one


def test_parts_of_a_previous_step_are_counted_in_words() -> None:
    tokens = SimpleNamespace(of=lambda name: torch.zeros(3, 1))
    previous = SimpleNamespace(tokens=tokens, verb="read", base=None)
    says = [known.says for known, _ in miscounted_states.handed_over(torch.zeros(1), previous)]  # type: ignore[arg-type]
    assert says[1:] == ["was continued from the state after 1 token of the previous step; 3 tokens were read",
                        "was continued from the state after 2 tokens of the previous step; 3 tokens were read"]


def test_wrong_states_of_earlier_rounds_are_named_by_their_age() -> None:
    """The states of two requests in the two latest rounds. A state before a window is named where it is the oldest."""
    pieces = {name: SimpleNamespace(request=name, layer=1) for name in "ab"}
    older, latest = ({(name, 1): piece for name, piece in pieces.items()} for _ in range(2))
    del latest["b", 1]
    theirs = SimpleNamespace(count=2, right="right", k=range(3), counts=lambda: (1, 0), after=lambda count: count)
    rounds = EarlierRounds(lambda piece, others: theirs)  # type: ignore[arg-type, return-value]
    rounds._rounds.extend(({("a", 0): SimpleNamespace(layer=0)} | older, latest))
    scene: Any = SimpleNamespace(carried=lambda state: [])
    says = [known.says for known, *_ in rounds.wrong_states(pieces["a"], scene)]  # type: ignore[arg-type]
    assert len(says) == 6 and not [one for one in says if "in this round" in one]
    assert len([one for one in says if "before its window, 1 round ago" in one]) == 2
    assert next(known.says for known, *_ in rounds.wrong_states(pieces["b"], scene)).endswith("in this round")


def test_weights_of_a_norm_are_confused_with_the_other_convention(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.tensor([1.0, 3.0])
    monkeypatch.setattr(norms, "norm_input", lambda case: torch.ones(1, 2))
    for name in ("_neighbours", "_weights_of_others"):
        monkeypatch.setattr(norms, name, lambda *given: iter(()))
    for centred, stored, used, says in ((True, weight, 1 + weight, "is scaled with w, not with 1 + w"),
                                        (False, 1 + weight, 1 + weight, "is scaled with 1 + w, not with w")):
        monkeypatch.setattr(norms, "_norm_weight", lambda case: weight)
        config = SimpleNamespace(eps=0.0, core_eps=0.0, row_norms=False, centred_norms=centred)
        case = SimpleNamespace(component="normed", right=used[None], piece=object(), weights=SimpleNamespace(
            config=config, draft=None), finding=SimpleNamespace(place=Place("trunk", 0, "normed")))  # fmt: skip
        made = named_tensors(norms.norms(case))  # type: ignore[arg-type]
        scaled = {one: made[one][0].tolist() for one in made if one.startswith("is scaled")}
        other = stored if centred else 1 + stored
        assert scaled == {says: other.tolist(), f"is scaled with no weight, not with {says.rpartition('not with ')[2]}":
                          [1.0, 1.0]}  # fmt: skip


def test_tokens_by_which_a_stale_state_is_late_are_counted_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.zeros(2, 1)
    monkeypatch.setattr(miscounted_states, "joined", lambda runs: (rows,) * 5)
    monkeypatch.setattr(miscounted_states, "_undone", lambda state, *given: state)
    last: Any = SimpleNamespace(recalls=True)
    says = [known.says for known, _ in miscounted_states.stale(torch.zeros(1), last)]
    assert says == [f"was continued from the state of {tokens} before" for tokens in ("1 token", "2 tokens")]


def test_a_shared_expert_is_gated_by_its_rows_or_not_at_all() -> None:
    """2 rows of 3 channels: the gate reads the first one. Without a bias, scores are a softmax over the experts."""
    x, scores = torch.tensor([[0.0, 5.0, 5.0], [2.0, 5.0, 5.0]]), torch.tensor([[1.0, 1.0, 3.0], [0.0, 0.0, 0.0]])
    mlp: Any = SimpleNamespace(shared_gate=torch.tensor([[1.0, 0.0, 0.0]]), bias=None)
    mix = Mixture(SimpleNamespace(), mlp, x, scores, scores.argsort(descending=True))  # type: ignore[arg-type]
    assert torch.allclose(mix.opened, torch.sigmoid(torch.tensor([[0.0], [2.0]])))
    assert torch.allclose(mix.chances(scores).sum(-1), torch.ones(2)) and mix.chances(scores)[1, 0] == 1 / 3
    mlp.shared_gate, mlp.bias = None, torch.zeros(3)
    assert mix.opened.tolist() == [[1.0], [1.0]] and mix.chances(scores)[1].tolist() == [0.5] * 3


def test_kept_paths_are_compared_with_the_best_other_one() -> None:
    """Scores by their distance: a path may be kept if no other one is far above it."""
    scores: Any = SimpleNamespace(_part=lambda kept, other: float(other[0] - kept[0]))
    paths = [(1,), (4,), (2,)]
    assert Scores.disorder(scores, [(1,)], paths, ordered=False) == 3
    assert Scores.disorder(scores, [(2,), (4,)], paths, ordered=False) == -1
    assert Scores.disorder(scores, [(2,), (4,)], paths, ordered=True) == 2
    assert Scores.disorder(scores, paths, paths, ordered=False) == 0


def test_a_look_needs_enough_new_samples() -> None:
    samples = Samples("core", 0, 0)
    for count, looked, due in ((FEWEST_SAMPLES - 1, 0, False), (FEWEST_SAMPLES, 0, True),
                               (LOOKS * FEWEST_SAMPLES - 1, FEWEST_SAMPLES, False),
                               (LOOKS * FEWEST_SAMPLES, FEWEST_SAMPLES, True)):  # fmt: skip
        samples.count, samples.looked = count, looked
        assert samples.due() is due


@pytest.mark.parametrize(("first", "child", "other"), [(0.49, True, False), (0.51, False, True), (0.0, True, False)])
def test_a_token_of_half_the_weight_is_drawn_in_one_half_of_the_uniforms(
    first: float, child: bool, other: bool
) -> None:
    """Two tokens of equal weight, of which the first is a draft; in fp64 nothing else is allowed."""
    logits = torch.zeros(2, dtype=torch.float64)
    for tokens, parents in (((9, 0), (-1, 0)), ((9, 0, 1), (-1, 0, 0))):
        drawing: Any = SimpleNamespace(sampling=Sampling(1.0), at_nodes=[first] * 3, final=0.5, tokens=tokens,
                                       parents=parents)  # fmt: skip
        row = Row(logits, drawing, 0)
        assert reachable(row, 0, 0.0, torch.float64) is child and reachable(row, 1, 0.0, torch.float64) is other
    large = Row(logits + 100, SimpleNamespace(**{**vars(drawing), "at_nodes": [0.5] * 3}), 0)  # type: ignore[arg-type]
    assert all(reachable(large, token, 0.0, torch.float32) for token in (0, 1)), "rounding may decide"


@pytest.fixture(scope="module")
def of_labels(tmp_path_factory: pytest.TempPathFactory) -> list[EventContext]:
    opened = check_contexts.checkpoint(tmp_path_factory.mktemp("labels"))
    return list(check_contexts.run_labels(opened, check_contexts.events_of(opened)[:6]))


@few(2)
@pytest.mark.parametrize(("layer", "component", "label", "says"), [
    (2, "normed", lambda of: mix(of(1, "residual"), code(Place("trunk", 2, "normed"))),
     "row 0 is made from `residual` of layer 1, row 0, not from `hidden` of layer 1, row 0"),
    (2, "normed", lambda of: mix(0, code(Place("trunk", 2, "normed"))),
     "row 0 is made from zeros, not from `hidden` of layer 1, row 0"),
    (2, "normed", lambda of: mix(of(1, "hidden"), code(Place("trunk", 1, "normed"))),
     "row 0 is made with the weights of layer 1, not of layer 2"),
    (3, "query", lambda of: mix(mix(of(3, "projected"), 2), code(Place("trunk", 3, "query"))),
     "row 0 is made from position 2, not from position 0"),
    (2, "residual", lambda of: mix(mix(of(1, "hidden"), of(2, "gated")), code(Place("trunk", 2, "residual"))),
     "row 0 is made from `gated`, row 0, not from `mixer`, row 0"),
    (2, "residual", lambda of: mix(mix(of(1, "mixer"), of(2, "gated")), code(Place("trunk", 2, "residual"))),
     "row 0 is wrong in"),  # two parts are wrong, so neither is named
    (2, "normed", lambda of: mix(12345678901, code(Place("trunk", 2, "normed"))), "row 0 is wrong in"),
    (STAGE_LEVEL, "embedding",
     lambda of: mix(int(pattern(math.nan, torch.int64)), code(Place("trunk", STAGE_LEVEL, "embedding"))),
     "row 0 is the embedding of poison (memory that nothing wrote); the trace has "),
], ids=["other-row", "zeros", "other-layer", "position", "second-part", "two-parts", "unknown", "poison"])  # fmt: skip
def test_labels_tell_what_a_row_was_made_from(
    of_labels: list[EventContext], layer: int, component: str, label: Any, says: str
) -> None:
    place = Place("trunk", layer, component)
    context = next(one for one in of_labels if isinstance(one.event, Forward) and len(one.subject.places[place]) > 3)

    def first(at: int, name: str) -> int:
        return heads(context.truth.places[Place("trunk", at, name)])[0]

    def put(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((expand([label(first)], x.shape[1:]), x[1:]))

    wrong = check_contexts.with_rows(context, place, put)
    wrong = replace(wrong, log=replace(wrong.log, poison=math.nan))
    check = next(check for check in for_labels() if check.name == "labels")
    said = explained([found for found in check(wrong) if not found.agrees], wrong, None, RunHistory())
    assert said[0].place == place and said[0].diagnosis.startswith(says) and "raised" not in said[0].diagnosis


def test_mixtures_are_undone() -> None:
    for first, second in ((0, 0), (7, 1 << 63), (MASK, 12345), (1 << 40, MASK)):
        assert undone(mix(first, second), second) == first
