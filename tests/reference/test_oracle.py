"""The reference agrees with `transformers`, which nobody here wrote: layers, logits, memory and the draft head.

Leaves out: rounds of speculation, of which transformers has no counterpart that keeps the state.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: the oracle of the reference is missing")

from instep_reference import trunk
from instep_reference.weights import GdnWeights, Weights
from support import parity, parity_table
from support.parity import CASES, DTYPES, HEADS

NAMES = [case.name for case in (*CASES, *HEADS)]
MARGIN = 1.0001  # one ten-thousandth more: far below anything that a norm over a layer would show in bf16


@pytest.mark.parametrize("width", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_the_reference_computes_what_transformers_computes(name: str, width: str) -> None:
    row = parity.parity(name, width)
    assert row.compared > 0
    assert row.worst <= row.allowed, f"hidden {row.hidden:.1e}, logits {row.logits:.1e}, memory {row.memory}"


def test_the_committed_table_speaks_for_these_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    rows = parity.everything()
    with capsys.disabled():
        print(f"\n\nreference against transformers, worst relative error\n{parity_table.table(rows)}")
    stored = parity_table.stored()
    assert [(row.configuration, row.width) for row in stored] == [(row.configuration, row.width) for row in rows]
    assert all(row.worst <= row.allowed for row in stored)
    assert [row.compared for row in stored] == [row.compared for row in rows], "measure anew: see support/parity.py"


def test_a_slightly_wrong_decay_in_one_head_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = trunk.advance

    def sabotaged(weights: Weights, *args: object, **kwargs: object) -> object:
        layer = weights.layers[1]
        assert isinstance(layer.mixer, GdnWeights)
        A_log = layer.mixer.A_log.clone()
        A_log[0] *= MARGIN
        wrong = replace(layer, mixer=replace(layer.mixer, A_log=A_log))
        layers = (weights.layers[0], wrong, *weights.layers[2:])
        return honest(replace(weights, layers=layers), *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(trunk, "advance", sabotaged)
    row = parity.parity.__wrapped__(CASES[0].name, "fp64")
    assert not row.worst <= row.allowed
