"""All explanations of wrong norms, each computed again from the definition of its norm.

Leaves out: norms inside other ops (`test_formulas.py`), and whole runs (`test_mistakes.py`).
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.diagnose.mistakes import norms
from instep.oracle.single_layer_run import LayerWork
from instep_reference.contract.config import LATENT_EPS
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place
from instep_reference.norms import L2_EPS
from instep_reference.weights import (
    AttentionWeights,
    GdnWeights,
    LatentWeights,
    LayerWeights,
    LightningWeights,
    StreamWeights,
)
from support.inputs.small_cases import NONE, SmallCase, changed_mixer, drawn, yields

EPS, CORE_EPS = 0.05, 0.3
T, D = 3, 4
STREAMS = StreamWeights(NONE, NONE, NONE, None)


def config_of(**given: Any) -> Any:
    config = dict(eps=EPS, core_eps=CORE_EPS, row_norms=False, head_norms=True, centred_norms=True, latent=0,
                  key_heads=2, key_dim=3, recurrence=SimpleNamespace(inputs="normed", norm="head"))  # fmt: skip
    return SimpleNamespace(**config | given)


def otherwise(
    x: torch.Tensor, w: torch.Tensor, eps: float, l2: bool = False, other_eps: float | None = None,
    columns: Any = None, rows: Any = (), heads: bool = False,
) -> list[tuple[str, torch.Tensor]]:  # fmt: skip
    """Rows that are normed wrongly, and then multiplied by w.

    columns: a sentence, and the sum and number of squares for it; rows: the sums of the rows before and after
    """
    n, total = x.shape[-1], x.pow(2).sum(-1, keepdim=True)
    size = 1 if l2 else n
    due = [(f"is normed {says}", (total / size + other).sqrt()) for says, other in (
        ("with 10 times the eps", 10 * eps), ("with a tenth of the eps", 0.1 * eps), ("without eps", 0),
        *([("with the eps of the other norms", other_eps)] if other_eps else ()))]  # fmt: skip
    due += [("is normed with eps outside the root", (total / size).sqrt() + eps),
            ("is not normed at all", torch.ones_like(total))]  # fmt: skip
    if l2:
        due += [("is normed with eps on the mean of the squares, not on their sum", (total + n * eps).sqrt()),
                ("is normed by the mean of the squares, not by their sum", (total / n + eps).sqrt()),
                ("is normed by the sum of the squares, without the root", total + eps)]  # fmt: skip
    else:
        due += [("is normed by the sum of the squares, not by their mean", (total + eps).sqrt()),
                ("is normed by the mean of the squares, without the root", total / n + eps)]  # fmt: skip
    if columns is not None:
        says, squares, count = columns
        due += [(f"is normed {says}", (squares / count * (n if l2 else 1) + eps).sqrt())]
    right = (total / size + eps).sqrt()
    due += [(f"is normed with the root mean square of the row {word} it", (squares / size + eps).sqrt())
            for word, squares in zip(("before", "after"), rows, strict=False)]  # fmt: skip
    if len(x) > 1:
        due += [("is normed with the root mean square of the first row", right[[0] * len(x)])]
    for step, word in ((-1, "before"), (1, "after")) if heads else ():
        order = [(head + step) % x.shape[1] for head in range(x.shape[1])]
        due += [(f"is normed with the root mean square of the head {word} it", right[:, order])]
    return [(says, x / by * w) for says, by in due]


def reweighted(
    x: torch.Tensor, eps: float, used: torch.Tensor, name: str, others: Any = (), gate: Any = 1.0
) -> list[tuple[str, torch.Tensor]]:
    """Rows with another weight. used: the right factor; others: sentence and factor of other weights"""
    normed = x / (x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt()
    scales = [("w", used - 1 if name == "1 + w" else used), ("1 + w", used if name == "1 + w" else used + 1),
              ("no weight", torch.ones_like(used))]  # fmt: skip
    due = [(f"is scaled with {says}, not with {name}", normed * scale * gate) for says, scale in scales if says != name]
    due += [(f"is scaled with {says}", normed * scale * gate) for says, scale in others]
    return due + [(f"is rounded to {name} before its weight", normed.to(dtype).double() * used * gate)
                  for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16))]  # fmt: skip


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize(("component", "reads"), [
    ("normed", ""), ("post_normed", "residual"), ("post_normed", ""), ("mixer_normed", "mixer"), ("mlp_normed", "mlp")])
def test_a_layer_norms_its_rows(
    component: str, reads: str, centred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Request "a" has rows 2 to 4 of 6. A norm of the residual is also that of its neighbours in the batch."""
    batch = drawn(6, D)
    x, first, second = batch[2:5].clone(), drawn(D) + 1, drawn(D) + 2
    x[1, 2] = 0
    mine, other = (first, second) if component in ("normed", "mixer_normed") else (second, first)
    mixer: Any = LatentWeights(NONE, NONE, drawn(D) + 3, NONE, NONE) if centred else GdnWeights(
        NONE, NONE, NONE, NONE, NONE, NONE, NONE, drawn(D) + 3, NONE)  # fmt: skip
    case = SmallCase(component, config_of(centred_norms=centred), [LayerWeights(first, mixer, second, None)])
    case.piece = SimpleNamespace(work=LayerWork("trunk", 0, x if not reads else x + 9, 0))
    case.rows = {reads: x} if reads else {}
    total = x.pow(2).sum(-1, keepdim=True)
    case.right = x / (total / D + EPS).sqrt() * (1 + mine)
    spans = [SimpleNamespace(request=name, begin=begin, count=3) for name, begin in (("b", 3), ("a", 2))]
    rows, neighbours = batch.clone(), ()
    if component == "post_normed":
        squares = rows.pow(2).sum(-1, keepdim=True)
        neighbours = (squares[1:4], squares[3:6])  # type: ignore[assignment]
    monkeypatch.setattr(norms, "row_spans", lambda context, stage: spans if stage == "trunk" else [])
    case.context = SimpleNamespace(subject=SimpleNamespace(places={Place("trunk", 0, "residual"): rows}))

    def due(others: bool = True, rows: Any = neighbours) -> list[tuple[str, torch.Tensor]]:
        return otherwise(x, 1 + mine, EPS, rows=rows) + reweighted(
            x, EPS, 1 + mine, "1 + w" if centred else "w",
            [("the weight of the layer's other norm", 1 + other)] if others else ())  # fmt: skip

    assert yields(norms.norms(case), due())
    streams = (first, STREAMS) if mine is first else (STREAMS, second)
    case.layers = [LayerWeights(streams[0], None, streams[1], None)]
    assert yields(norms.norms(case), due(others=False)), "streams have no weight that these rows have"
    case.layers = [LayerWeights(STREAMS, None, STREAMS, None)]
    assert yields(norms.norms(case), otherwise(x, 1 + mine, EPS, rows=neighbours)), "no weight is known"
    case.layers = [LayerWeights(first, None, second, None)]
    for name, begin, count in (("a", 2, 2), ("a", 4, 3), ("b", 2, 3)):
        spans = [SimpleNamespace(request=name, begin=begin, count=count)]
        assert yields(norms.norms(case), due(rows=())), "the rows of the batch are not known"
    case.context.subject.places = {}
    spans = [SimpleNamespace(request="a", begin=2, count=3)]
    assert yields(norms.norms(case), due(rows=()))
    if component == "post_normed":  # the last rows of the batch
        case.context.subject.places = {Place("trunk", 0, "residual"): rows[:5]}
        at = rows[[4, 0, 1, 2, 3, 4, 0]].pow(2).sum(-1, keepdim=True)
        assert yields(norms.norms(case), due(rows=(at[2:5], at[4:7])))
    for piece in (None, SimpleNamespace(work=None)):
        case.rows, case.piece = {}, piece
        assert yields(norms.norms(case), ()), "its rows are not known"


def test_a_norm_of_one_row_has_no_other_rows() -> None:
    """A weight of -1 leaves nothing, so another weight has the same result there."""
    x, weight = drawn(1, D), torch.tensor([-1.0, 0.5, -2.0, 3.0]).double()
    case = SmallCase("normed", config_of(), [LayerWeights(weight, None, None, None)])
    case.piece = SimpleNamespace(work=LayerWork("trunk", 0, x, 0))
    case.right = x / (x.pow(2).mean() + EPS).sqrt() * (1 + weight)
    keeps = torch.tensor([0.0, 1, 1, 1]).double()
    due = reweighted(x, EPS, 1 + weight, "1 + w")
    assert yields(norms.norms(case), otherwise(x, 1 + weight, EPS) + [(says, wrong * keeps) for says, wrong in due])
    case.stage, case.right = "block", torch.zeros(1, D + 1)
    assert norms._norm_weight(case) is None and not [*norms._reweighted(case, "", weight, weight)]


@pytest.mark.parametrize("stage", ["trunk", "extend"])
def test_the_last_norm_reads_the_rows_of_the_last_layer(stage: str) -> None:
    """Layers 0 to 2, of which the last lacks rows of a request; and the norms of the draft head around them."""
    x, hidden, last = drawn(T, D), drawn(D) + 1, drawn(D) + 2
    draft = SimpleNamespace(norm=drawn(D), norm_embedding=drawn(D) + 3, norm_hidden=hidden, layers=[])
    mine = last if stage == "trunk" else draft.norm
    case = SmallCase("final", config_of(), (), stage=stage, layer=AFTER_LAYERS, draft=draft, final_norm=last)

    def piece(layer: int, rows: torch.Tensor, request: str = "a", of: str = stage, shown: str = "hidden") -> Any:
        return SimpleNamespace(stage=of, layer=layer, request=request, own={shown: rows}, place=lambda name: name)

    case.pieces = [piece(0, x + 1), piece(2, x + 2, "b"), piece(2, x), piece(1, x + 3), piece(3, x + 4, of="other"),
                   piece(AFTER_LAYERS, x + 5), piece(AFTER_LAYERS + 1, x + 6)]  # fmt: skip
    case.right = x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * (1 + mine)
    theirs = [] if stage == "trunk" else [("the weight of the trunk's last norm", 1 + last)]
    due = otherwise(x, 1 + mine, EPS)
    assert yields(norms.norms(case), due + reweighted(x, EPS, 1 + mine, "1 + w", theirs))
    case.final_norm = STREAMS
    assert yields(norms.norms(case), due + (reweighted(x, EPS, 1 + mine, "1 + w") if stage == "extend" else []))
    if stage == "extend":
        case.draft, case.final_norm = None, last
        assert yields(norms.norms(case), due), "a block drafter"
    for pieces in ([piece(2, x, shown="other")], [piece(2, x, "b")], []):
        case.pieces = pieces
        assert yields(norms.norms(case), ())


def test_the_draft_head_norms_embeddings() -> None:
    x = drawn(2, D)
    draft = SimpleNamespace(norm=drawn(D), norm_embedding=drawn(D) + 3, norm_hidden=drawn(D) + 1, layers=[])
    for centred in (True, False):
        case = SmallCase("normed", config_of(centred_norms=centred), (), {"embedding": x}, stage="extend",
                         layer=STAGE_LEVEL, draft=draft, final_norm=drawn(D))  # fmt: skip
        w = 1 + draft.norm_embedding
        case.right = x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * w
        assert yields(norms.norms(case), otherwise(x, w, EPS) + reweighted(
            x, EPS, w, "1 + w" if centred else "w",
            [("the weight of the norm of the hidden row", 1 + draft.norm_hidden)]))  # fmt: skip
        case.component = "post_normed"
        assert yields(norms.norms(case), ()), "the hidden row is of another stage"


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("core_eps", [EPS, CORE_EPS])
def test_a_gated_norm_takes_heads_or_rows(
    heads: int, by_row: bool, core_eps: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Request "a" has the first 3 rows of 4."""
    core, z = drawn(4, heads, 5), drawn(T, heads, 5) + 2
    x, eps = core[:T], core_eps
    weight = drawn(heads * 5 if by_row else 5) + 2
    mixer = LightningWeights(NONE, NONE, NONE, weight, NONE) if by_row else GdnWeights(
        NONE, NONE, NONE, NONE, NONE, NONE, NONE, weight, NONE)  # fmt: skip
    config = config_of(core_eps=eps, recurrence=SimpleNamespace(inputs="x", norm="row" if by_row else "head"))
    case = SmallCase("gated", config, [LayerWeights(drawn(5), mixer, drawn(5) + 1, None)], {"core": x})
    rows = x.reshape(T, heads * 5) if by_row else x
    w = weight * (z.flatten(1) if by_row else z)
    case.right = (rows / (rows.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w).reshape(x.shape)
    monkeypatch.setattr(norms, "row_spans", lambda *given: [SimpleNamespace(request="a", begin=0, count=T)])
    case.context = SimpleNamespace(subject=SimpleNamespace(places={Place("trunk", 0, "core"): core}))
    squares = core.pow(2).reshape(4, -1, rows.shape[-1]).sum(-1, keepdim=True) if not by_row else (
        core.pow(2).sum((1, 2))[:, None])  # fmt: skip
    near = squares[[3, 0, 1]], squares[1:4]
    columns = None
    if by_row or heads == 1:
        each = x.pow(2).sum(-1, keepdim=True).expand_as(x).reshape(rows.shape)
        columns = ("head by head, not over all heads of a row", each, 5)
    else:
        columns = ("over all heads of a row, not head by head", x.pow(2).sum((1, 2), keepdim=True), 5 * heads)
    due = otherwise(rows, w, eps, other_eps=EPS if eps != EPS else None, columns=columns, rows=near, heads=not by_row)
    due += reweighted(rows, eps, weight, "w", gate=w / weight)
    if by_row and heads > 1:
        due = [one for one in due if not one[0].startswith("is scaled")]
    assert yields(norms.norms(case), [(says, wrong.reshape(x.shape)) for says, wrong in due])
    case.config.recurrence.inputs = "selective"
    assert yields(norms.norms(case), ()), "`selective_states.py` has these"
    case.rows, case.config.recurrence.inputs = {}, "x"
    assert yields(norms.norms(case), ())


@pytest.mark.parametrize("component", ["q", "k"])
def test_rows_of_the_delta_rule_have_length_1(component: str) -> None:
    """Two heads with 3 channels of queries, then as many of keys, then values."""
    mixed = drawn(T, 14) * 1e-3
    x = mixed[:, :6].view(T, 2, 3) if component == "q" else mixed[:, 6:12].view(T, 2, 3)
    case = SmallCase(component, config_of(), [LayerWeights(drawn(3), None, drawn(3), None)], {"mixed": mixed})
    case.right = x / (x.pow(2).sum(-1, keepdim=True) + L2_EPS).sqrt()
    everywhere = ("over all heads of a row, not head by head", x.pow(2).sum((1, 2), keepdim=True), 6)
    one = torch.ones(())
    assert yields(norms.norms(case), otherwise(x, one, L2_EPS, l2=True, columns=everywhere, heads=True))
    case.rows = {}
    assert yields(norms.norms(case), ())


@pytest.mark.parametrize("component", ["query", "key"])
def test_queries_and_keys_are_normed_head_by_head_or_not(component: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Request "a" has the last 3 rows of 5; two heads. Queries are the first half of their projection."""
    monkeypatch.setattr(norms, "with_mixer", changed_mixer)
    raw, projected = drawn(5, 2, 3), drawn(T, 2, 2, 3)
    x = projected[:, :, 0] if component == "query" else raw[2:]
    weight = drawn(3) + 1
    mixer = AttentionWeights(NONE, NONE, NONE, *((weight, NONE) if component == "query" else (NONE, weight)), NONE)
    case = SmallCase(component, config_of(), [LayerWeights(None, mixer, None, None)],
                     {"projected": projected, "key_raw": raw[2:]})  # fmt: skip
    w = 1 + weight
    case.right = x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * w
    monkeypatch.setattr(norms, "row_spans", lambda *given: [SimpleNamespace(request="a", begin=2, count=T)])
    case.context = SimpleNamespace(subject=SimpleNamespace(places={Place("trunk", 0, "key_raw"): raw}))
    squares = raw.pow(2).sum(-1, keepdim=True)
    everywhere = ("over all heads of a row, not head by head", x.pow(2).sum((1, 2), keepdim=True), 6)
    plain: list[Any] = otherwise(x, w, EPS, columns=everywhere, heads=True,
                                 rows=() if component == "query" else (squares[1:4], squares[[3, 4, 0]]))  # fmt: skip
    changes = [(f"is scaled with {says}, not with 1 + w", {f"{component}_norm": other})
               for says, other in (("w", weight - 1), ("no weight", weight * 0))]  # fmt: skip
    assert yields(norms.norms(case), plain + changes)
    for layers in ([], [LayerWeights(None, None, None, None)]):
        case.layers = layers
        assert yields(norms.norms(case), plain)
    case.config.head_norms = False
    says = "is normed, and this model type norms no queries and keys"
    assert yields(norms.norms(case), [(says, case.right / (x.pow(2).sum(-1, keepdim=True) / 3 + EPS).sqrt())])
    case.config.latent = 4
    assert yields(norms.norms(case), ()), "latent attention norms neither"
    case.config.latent, case.config.recurrence.inputs = 0, "selective"
    assert yields(norms.norms(case), ()), "attention of Nemotron-H norms neither"
    case.config.recurrence.inputs, case.rows = "normed", {}
    assert yields(norms.norms(case), ())


@pytest.mark.parametrize("eps", [EPS, LATENT_EPS])
def test_latents_are_normed_without_the_shared_key(eps: float) -> None:
    """Latents of 3 channels, and 2 of the shared key."""
    raw, weight = drawn(T, 1, 5), drawn(3) + 1
    x, w = raw[..., :3], 1 + weight
    mixer = LatentWeights(NONE, NONE, weight, NONE, NONE)
    case = SmallCase("value", config_of(latent=3, eps=eps), [LayerWeights(drawn(3), mixer, drawn(3), None)],
                     {"key_raw": raw})  # fmt: skip
    case.right = x / (x.pow(2).mean(-1, keepdim=True) + LATENT_EPS).sqrt() * w
    together = ("over the latent and the shared key together", raw.pow(2).sum(-1, keepdim=True), 5)
    assert yields(norms.norms(case), otherwise(x, w, LATENT_EPS, other_eps=None if eps == LATENT_EPS else eps,
                                               columns=together, heads=True) + reweighted(x, LATENT_EPS, w, "1 + w"))
    for rows, latent in (({}, 3), ({"key_raw": raw}, 0)):
        case.rows, case.config.latent = rows, latent
        assert yields(norms.norms(case), ())
    case.component, case.rows = "mixed", {"mixed": raw}
    assert yields(norms.norms(case), ()), "no norm makes it"


@pytest.mark.parametrize("component", ["query", "key"])
def test_queries_and_keys_are_normed_over_all_heads_of_a_row(component: str) -> None:
    """Three rows of two heads with four channels."""
    x, weight = drawn(T, 2, 4), drawn(8)
    rows = {"projected": x[:, :, None].expand(T, 2, 2, 4), "key_raw": x}
    mixer = AttentionWeights(NONE, NONE, NONE, *((weight, NONE) if component == "query" else (NONE, weight)), NONE)
    case = SmallCase(component, config_of(row_norms=True), [LayerWeights(None, mixer, None, None)], rows)
    w, mean = (1 + weight).view(2, 4), x.pow(2).flatten(1).sum(1)[:, None, None] / 8
    normed = x / (mean + EPS).sqrt()
    near = [(mean[order] + EPS).sqrt() for order in ([2, 0, 1], [1, 2, 0])]
    due = [("is normed head by head, not over all heads of a row",
            x / (x.pow(2).sum(-1, keepdim=True) / 4 + EPS).sqrt() * w),
           ("is not normed at all", x), ("is normed without a weight", normed),
           ("is scaled with 1 + w, not with w", normed * (1 + w)),
           ("is scaled with the weights of the first head", normed * w[[0, 0]])]  # fmt: skip
    for word, by in zip(("before", "after"), near, strict=True):
        due += [(f"is scaled with the weights of the head {word}", normed * w[[1, 0]]),
                (f"is normed with the root mean square of the row {word}", x / by * w)]  # fmt: skip
    due += [("is scaled with weights read as [head_dim, heads]", normed * (1 + weight.view(4, 2).T)),
            ("is normed by the sum of the squares, not by their mean", x / (8 * mean + EPS).sqrt() * w)]  # fmt: skip
    due += [(f"is normed with {says}", x / (mean + eps).sqrt() * w)
            for says, eps in (("10 times the eps", 10 * EPS), ("a tenth of the eps", EPS / 10), ("no eps", 0.0))]
    assert yields(norms.norms(case), due)
    for layers in ([], [LayerWeights(None, None, None, None)]):
        case.layers = layers
        assert yields(norms.norms(case), ())
