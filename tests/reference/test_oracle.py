"""The reference agrees with `transformers`, an independent implementation: layers, logits, memory, draft head.

Leaves out: rounds of speculation, because transformers has no counterpart that keeps the state.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from documentation import parity, parity_table
from documentation.parity import CASES, DTYPES, HEADS, Case
from instep_reference import attention, gdn, trunk
from instep_reference.contract.place_names import Place
from instep_reference.norms import L2_EPS
from instep_reference.weights import Weights
from support.running.covering import WHOLE, few

pytestmark = [  # imports transformers
    pytest.mark.slow, pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]

NAMES = [case.name for case in (*CASES, *HEADS)]
# fp64 shows whether the formulas are the same; fp32 is only for the first of each family, and trained models.
IN_FP32 = {name for index, name in enumerate(NAMES) if "trained" in name or name.split(",")[0] not in {
    before.split(",")[0] for before in NAMES[:index]}}  # fmt: skip
MARGIN = 1.0001  # one ten-thousandth more: far below anything that a norm over a layer would show in bf16


@pytest.fixture(scope="module")
def stored() -> dict[tuple[str, str], parity_table.Parity]:
    return {(row.configuration, row.width): row for row in parity_table.stored()}


@few(5)
@pytest.mark.parametrize(("name", "width"), [
    pytest.param(name, width, marks=() if width == "fp64" or name in IN_FP32 else WHOLE)
    for name in NAMES for width in DTYPES
])  # fmt: skip
def test_reference_agrees_with_transformers(
    name: str, width: str, stored: dict[tuple[str, str], parity_table.Parity]
) -> None:
    row = parity.parity(name, width)
    assert row.compared == stored[name, width].compared > 0, "measure anew: see documentation/parity.py"
    assert row.worst <= row.allowed, f"hidden {row.hidden:.1e}, logits {row.logits:.1e}, memory {row.memory}"


@pytest.mark.parametrize("width", DTYPES)
def test_conv_of_width_1_agrees_with_transformers(width: str) -> None:
    row = parity._trunk(Case("conv width 1", "dense", {"linear_conv_kernel_dim": 1}), width)
    assert row.compared > 0 and row.worst <= row.allowed


def test_committed_table_covers_these_configurations(stored: dict[tuple[str, str], parity_table.Parity]) -> None:
    assert [*stored] == [(name, width) for name in NAMES for width in DTYPES]
    assert all(row.worst <= row.allowed for row in stored.values())


@WHOLE
def test_table_prints_the_figures_measured_here(capsys: pytest.CaptureFixture[str]) -> None:
    rows = parity.everything()
    with capsys.disabled():
        print(f"\n\nreference against transformers, worst relative error\n{parity_table.table(rows)}")
    assert [(row.configuration, row.width) for row in rows] == [(name, width) for name in NAMES for width in DTYPES]


def _decay_of_one_head(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = trunk.advance

    def advance(weights: Weights, *args: object, **kwargs: object) -> object:
        layer = weights.layers[1]
        A_log = layer.mixer.A_log.clone()
        A_log[0] *= MARGIN
        wrong = replace(layer, mixer=replace(layer.mixer, A_log=A_log))
        layers = (weights.layers[0], wrong, *weights.layers[2:])
        return correct(replace(weights, layers=layers), *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(trunk, "advance", advance)


def _eps_of_l2_outside_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gdn, "l2_norm", lambda x: x / ((x * x).sum(-1, keepdim=True).sqrt() + L2_EPS))


def _positions_one_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary is relative: no logit changes, only the stored keys."""
    correct = attention.rotate
    monkeypatch.setattr(attention, "rotate", lambda x, positions, config: correct(x, positions + 1, config))


def _rotary_angles_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.rotate
    monkeypatch.setattr(attention, "rotate", lambda x, positions, config: right(x.float(), positions, config).double())


def _a_row_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = trunk.rms_norm
    monkeypatch.setattr(trunk, "rms_norm", lambda x, weight, eps: correct(x.float(), weight, eps))


def _hidden_before_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(place: Place, x: torch.Tensor) -> torch.Tensor:
        return x.roll(x.shape[-1] // 2, -1) if place.component == "joined" else x

    monkeypatch.setattr(parity, "unseen", swapped)


TRUNK, HEAD = CASES[0].name, HEADS[0].name


@few(3)
@pytest.mark.parametrize(("plant", "name"), [
    (_decay_of_one_head, TRUNK), (_eps_of_l2_outside_the_root, TRUNK), (_positions_one_further, TRUNK),
    (_rotary_angles_in_fp32, TRUNK), (_a_row_in_fp32, TRUNK), (_hidden_before_embedding, HEAD),
])
def test_a_slight_error_would_be_noticed(
    plant: Callable[[pytest.MonkeyPatch], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    row = parity.parity.__wrapped__(name, "fp64")
    assert row.worst > 100 * row.allowed
