"""Explanations of results of gates, norms, attention and single blocks, each computed again by hand from a few numbers.

Leaves out: experts, streams, ranks and labels (`test_wrong_layers_alone.py`), and whole runs (`test_mistakes.py`).
"""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from instep.diagnose.mistakes import (
    constants,
    norms,
    residual_streams,
    rotary_and_visible_positions,
    selective_states,
)
from instep.oracle.single_layer_run import LayerWork
from instep_reference.attention import AttentionMemory
from instep_reference.contract.place_names import Place
from instep_reference.weights import AttentionWeights, GdnWeights, MlpWeights

NONE = torch.zeros(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def case_of(component: str, config: Any = None, layers: Any = (), **own: torch.Tensor) -> Any:
    """A finding in layer 0 with these rows of its layer."""
    weights = SimpleNamespace(config=config, layers=[*layers], draft=None)
    return SimpleNamespace(component=component, own=own.get, weights=weights, right=own.get(component),
                           finding=SimpleNamespace(place=Place("trunk", 0, component), request="a"))  # fmt: skip


def holds(found: Iterable[Any], due: dict[str, torch.Tensor]) -> bool:
    """Whether these explanations are found, with these tensors."""
    made = {one.sentence: one.wrong for one in found}
    assert due.keys() <= made.keys(), due.keys() - made.keys()
    return all(torch.allclose(made[says], wrong) for says, wrong in due.items())


def gdn(**given: Any) -> GdnWeights:
    return GdnWeights(**{name: NONE for name in GdnWeights.__annotations__} | given)


def test_decays_are_made_with_the_gates_of_other_heads() -> None:
    """Two tokens and three heads."""
    a, stored, bias = normal(2, 3), normal(3), normal(3) + 1
    rate, opened = stored.exp(), a + bias
    layer = SimpleNamespace(mixer=gdn(A_log=stored, dt_bias=bias))
    softplus = (1 + opened.exp()).log()
    due = {f"is made with A_log of the head {word}": -rate[order] * softplus
           for word, order in (("before", [2, 0, 1]), ("after", [1, 2, 0]))}  # fmt: skip
    due |= {"is made with A_log of the heads in the opposite order": -rate[[2, 1, 0]] * softplus,
            "is made without dt_bias": -rate * (1 + a.exp()).log(), "is made without A_log": -softplus,
            "is made with A_log itself, not with its exponential": -stored * softplus,
            "is made with a sigmoid, not with a softplus": -rate / (1 + (-opened).exp()),
            "is made without softplus": -rate * opened}  # fmt: skip
    case = case_of("log_decay", SimpleNamespace(decay_bound=None, layers=[1]), [layer], a=a)
    case.right = -rate * softplus
    assert holds(constants._log_decay(case), due)


def test_a_sum_lacks_one_of_its_parts_or_a_norm() -> None:
    hidden, mixer, normed = normal(2, 2), normal(2, 2) + 1, normal(2, 2) * 3
    config = SimpleNamespace(residual_factors=())
    case = case_of("residual", config, mixer=mixer)
    case.right = hidden + mixer
    assert holds(constants._sum(case), {"lacks the residual": mixer, "lacks what the layer adds": hidden})
    case = case_of("residual", config, mixer=mixer, mixer_normed=normed)
    case.right = hidden + normed
    assert holds(constants._sum(case), {"lacks the residual": normed, "lacks what the layer adds": hidden,
                                        "adds mixer without its norm": hidden + mixer})  # fmt: skip
    case.right = normal(2, 4)  # of two streams
    assert [one.sentence for one in constants._sum(case_of("residual", config, residual=case.right, mixer=mixer))] == []


def test_a_read_out_gets_another_part_of_its_values() -> None:
    """Two rows, two heads with two channels."""
    core, v, gate, skip = normal(2, 2, 2), normal(2, 2, 2) + 1, normal(2, 2), torch.tensor([2.0, 5.0]).double()
    case = case_of("skip", core=core, v=v, write=gate)
    due = {"lacks D v": core, "adds v, not D v": core + v, "has D v of the opposite sign": core - skip[:, None] * v,
           "adds D dt v, not D v": core + torch.stack([skip, skip])[..., None] * gate[..., None] * v}  # fmt: skip
    assert holds(selective_states._skip(case, gdn(skip=skip)), due)
    assert not [*selective_states._skip(case, gdn(skip=None))]


def test_a_block_alone_has_another_activation_or_no_residual() -> None:
    x, rows, up, down = normal(2, 3), normal(2, 3) + 1, normal(4, 3), normal(3, 4)
    mlp = MlpWeights(None, up, down)
    work = SimpleNamespace(work=LayerWork("trunk", 0, rows, 0))
    case = case_of("mlp", None, [SimpleNamespace(mlp=mlp)], post_normed=x)
    case.piece = work
    relu = (x @ up.T).clamp(min=0)
    assert holds(selective_states._of_one_block(case), {
        "has a ReLU that is not squared": relu @ down.T, "is squared before its ReLU": (x @ up.T) ** 2 @ down.T,
        "has a silu, not a squared ReLU": F.silu(x @ up.T) @ down.T})  # fmt: skip
    case = case_of("hidden", None, [SimpleNamespace(mlp=mlp)], post_normed=x, mlp=x + 5)
    case.piece = work
    found = {one.sentence: one.wrong for one in selective_states._of_one_block(case)}
    assert found.keys() == {"adds mlp to the normed rows", "lacks the residual", "lacks what the layer adds"}
    assert torch.allclose(found["adds mlp to the normed rows"], 2 * x + 5)
    assert torch.equal(found["lacks the residual"], x + 5) and torch.equal(found["lacks what the layer adds"], rows)


def test_rows_of_streams_are_normed_together_or_with_other_weights() -> None:
    """Two rows of two streams with two channels."""
    written, weight = normal(2, 4), normal(4)
    weights: Any = SimpleNamespace(conv_norm=weight, key_norm=weight + 1, query_norm=weight + 2)
    shape: Any = SimpleNamespace(streams=2)
    mean = written.square().mean(-1, keepdim=True)
    each = written.view(2, 2, 2).square().mean(-1, keepdim=True).expand(2, 2, 2).reshape(2, 4)
    case = case_of("ple_normed", SimpleNamespace(eps=1e-6), ple_written=written)
    assert holds(residual_streams._ple_normed(case, shape, weights, None), {  # type: ignore[arg-type]
        "is not normed": written, "is normed over all streams together": written / (mean + 1e-6).sqrt() * (1 + weight),
        "is normed with the weight of the norm of keys": written / (each + 1e-6).sqrt() * (2 + weight),
        "is normed with the weight of the norm of streams": written / (each + 1e-6).sqrt() * (3 + weight)})  # fmt: skip


def test_attention_reads_the_memory_of_another_request() -> None:
    """Three positions are kept. Request "b" has two, request "c" none, and "d" keeps nothing in this layer."""
    keys, values = normal(3, 1, 2), normal(3, 1, 2) + 1
    work = LayerWork("trunk", 0, normal(1, 2), 3, AttentionMemory(keys, values))
    theirs = {"a": (keys, values), "b": (keys[:2] + 5, values[:2] + 5), "c": (keys[:0], values[:0]), "d": None}
    case = case_of("attended")
    case.context = SimpleNamespace(subject=SimpleNamespace(before={name: SimpleNamespace(
        keys={} if its is None else {0: its[0]}, values={} if its is None else {0: its[1]}, block_keys={})
        for name, its in theirs.items()}))  # fmt: skip
    case.made = lambda says, memory: [(says, (memory.keys, memory.values))]
    found = dict(rotary_and_visible_positions._seen(case, work))  # type: ignore[arg-type]
    both = torch.cat((keys[:2] + 5, keys[2:])), torch.cat((values[:2] + 5, values[2:]))
    due = {'reads the keys and values of request "b"': both,
           'reads the values of request "b" under its own keys': (keys, both[1]),
           "sees nothing from before these rows": (keys[:0], values[:0]),
           "does not see the first position": (keys[1:], values[1:]),
           "does not see the last 2 positions before these rows": (keys[:1], values[:1]),
           "reads keys and values one position too late": (keys[[1, 2, 0]], values[[1, 2, 0]]),
           "reads values one position too late, with the right keys": (keys, values[[1, 2, 0]])}  # fmt: skip
    assert due.keys() <= found.keys() and not [says for says in found if any(f'"{name}"' in says for name in "acd")]
    assert all(map(torch.equal, [x for says in due for x in found[says]], [x for pair in due.values() for x in pair]))


@pytest.mark.parametrize("component", ["query", "key"])
def test_norms_over_all_heads_of_a_row_have_wrong_rows_weights_or_eps(component: str) -> None:
    """Two rows of two heads with three channels."""
    x, eps, weight = normal(2, 2, 3), 0.1, normal(6)
    mixer = AttentionWeights(NONE, NONE, NONE, *((weight, NONE) if component == "query" else (NONE, weight)), NONE)
    case = case_of(component, None, [SimpleNamespace(mixer=mixer)])
    w, mean = 1 + weight.view(2, 3), x.square().flatten(1).mean(1)[:, None, None]
    normed, each = x / (mean + eps).sqrt(), x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    due = {"is normed head by head, not over all heads of a row": each * w, "is not normed at all": x,
           "is normed without a weight": normed, "is scaled with 1 + w, not with w": normed * (1 + w),
           "is scaled with the weights of the first head": normed * w[[0, 0]],
           "is scaled with the weights of the head before": normed * w[[1, 0]],
           "is normed with the root mean square of the row after": x / (mean[[1, 0]] + eps).sqrt() * w,
           "is scaled with weights read as [head_dim, heads]": normed * (1 + weight.view(3, 2).T),
           "is normed by the sum of the squares, not by their mean": x / (6 * mean + eps).sqrt() * w}  # fmt: skip
    due |= {f"is normed with {says}": x / (mean + other).sqrt() * w
            for says, other in (("10 times the eps", 1.0), ("a tenth of the eps", 0.01), ("no eps", 0.0))}  # fmt: skip
    assert holds(norms._of_rows(case, x, eps), due)


def test_queries_are_normed_from_the_first_half_of_their_projection() -> None:
    """One row, two heads, queries before their gates."""
    projected = torch.arange(8.0).view(1, 2, 2, 2)
    config = SimpleNamespace(row_norms=False, latent=0, head_norms=True, recurrence=SimpleNamespace(
        norm="head", inputs="normed"))  # fmt: skip
    case = case_of("query", config, [SimpleNamespace(mixer=None)], projected=projected)
    case.piece = SimpleNamespace(work=None)
    found = norms.norm_input(case)
    assert found is not None and found.tolist() == [[[0, 1], [4, 5]]]
