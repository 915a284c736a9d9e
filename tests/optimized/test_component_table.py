"""The table of components and movers: no cell is empty, and a model with an empty cell is refused.

Leaves out: how the harness finds a mover that forgets a component (`harness/test_forgotten_components.py`).
"""

from dataclasses import replace

import pytest
import torch

from instep_optimized import Options, load
from instep_optimized.component_table import TABLE
from instep_optimized.engine_from_checkpoint import all_demands
from instep_optimized.memory import component_cells
from instep_optimized.memory.component_cells import MOVERS, Mover
from instep_optimized.options import check
from instep_reference.contract.answers import MEMORY_FACTS, ComponentFacts
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.engine import MEMORY, Capacity
from instep_reference.contract.errors import Unsupported
from instep_reference.contract.recurrences import KEPT_BY, PLE
from support.inputs.checkpoints import config_of

PLAIN, OPTIONS, GIVEN = load("plain"), Options(drafter="vanilla"), Options(drafter="external")
ROOM = Capacity(slots=(1,), pages=(1, 2, 3, 4), page_size=4, max_tokens=16, track_interval=4)


@pytest.fixture
def config() -> ModelConfig:
    """A model with two MTP layers, which also keeps the last rows."""
    return replace(ModelConfig.from_dict(config_of()), mtp_layers=2)


def test_each_mover_has_a_cell_for_each_component_of_the_contract(config: ModelConfig) -> None:
    assert tuple(TABLE) == MOVERS and all(set(cells) == set(MEMORY) for cells in TABLE.values())
    _, always, kept = all_demands(config, PLAIN, OPTIONS, ROOM, (2,))
    kinds = component_cells.kept_by(config)
    assert {demand.component for demand in always + kept} - {""} == set(kinds) == set(MEMORY[:6]) | {"tail"}


@pytest.mark.parametrize("mover", MOVERS)
def test_a_model_with_an_empty_cell_is_refused(
    mover: Mover, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty the cells of a mover one by one, and fill them again."""
    preceded = ModelConfig.from_dict(config_of("qwen4"))
    for name in MEMORY:
        if name in KEPT_BY[PLE]:
            with monkeypatch.context() as patch:
                patch.delitem(TABLE[mover], name)  # type: ignore[arg-type]
                check(OPTIONS, config, 2, PLAIN)
                said = rf"layer 0 \(ple\) of this model keeps '{name}', .* on {mover}: "
                with pytest.raises(Unsupported, match=said):
                    check(GIVEN, preceded, 2, PLAIN)
            check(GIVEN, preceded, 2, PLAIN)
            continue
        with monkeypatch.context() as patch:
            patch.delitem(TABLE[mover], name)  # type: ignore[arg-type]
            if name.startswith("block_"):  # this model has no block drafter
                check(OPTIONS, config, 2, PLAIN)
                continue
            with pytest.raises(Unsupported, match=f" keeps '{name}', and this engine does not move it on {mover}: "):
                check(OPTIONS, config, 2, PLAIN)
        check(OPTIONS, config, 2, PLAIN)


def test_a_component_of_an_unknown_name_or_form_is_refused(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(MEMORY_FACTS, "conv", ComponentFacts("ring"))  # type: ignore[arg-type]
        assert set(MEMORY) - set(component_cells.cells(block=1, rows=1, last=1)) == {"conv"}
    monkeypatch.setitem(KEPT_BY, config.recurrence.name, ("conv", "state", "echo"))  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match=r"layer 0 \(\w+\) keeps 'echo', which is no field of `RequestState`"):
        check(OPTIONS, config, 2, PLAIN)


def test_a_component_without_an_option_has_a_pool_and_a_strategy(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Give the layers one more block. Its pools are in the demands of both conv forms."""
    monkeypatch.setitem(KEPT_BY, config.recurrence.name, ("conv", "state", "echo"))  # type: ignore[arg-type]
    monkeypatch.setitem(MEMORY_FACTS, "echo", ComponentFacts("block", ("H", "K", "W-1")))  # type: ignore[arg-type]
    for conv in ("windows", "widened"):
        _, _, kept = all_demands(config, PLAIN, replace(OPTIONS, conv=conv), ROOM, (2,))
        pools = {demand.name: demand for demand in kept}
        echo, shape = pools["echo"], (config.key_heads, config.key_dim, config.conv_width - 1)
        assert (echo.shape, echo.layers, echo.dtype) == (shape, config.recurrent, torch.float32)
        assert pools["snapshot_echo"].shape == (3, *shape)
