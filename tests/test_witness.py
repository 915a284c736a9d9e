"""Both engines against a third computation, where `transformers` has none: several MTP layers, and a sigmoid gate.

The witness (`support/independent/dense_model.py`) shares no code with either. Leaves out: everything that
`transformers` covers.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from instep_reference.contract.adaptive_controller_file import AdaptiveFile, Bracket
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Admit, Commit, Draft, Event, Forward, Row, SetNumSteps
from instep_reference.contract.engine import Path as Way
from support.independent.dense_model import Array, Witness
from support.inputs.checkpoints import write
from support.worlds import engine_and_reference as sides

CLOSE = 1e-9  # absolute; values are of order 1, and sums of this size err by 1e-14
SHAPE: dict[str, Any] = {"num_hidden_layers": 2, "full_attention_interval": 2, "vocab_size": 24}
PROMPT, ROOT = (5, 9, 3, 2, 11), 17


def engine(side: str, folder: Path, mode: str) -> Any:
    """In fp64, with three drafts a round at first."""
    model, file = Checkpoint.open(folder), AdaptiveFile(flat=Bracket(candidate_steps=(1, 2, 3)))
    if side == "reference":
        return sides.truth(model, adaptive=file, mode=mode)
    return sides.engine(model, adaptive=file, drafter=mode, **sides.WIDE)


def serve(subject: Any, *events: Event) -> Any:
    return [event.on(subject) for event in events][-1]


def off(found: torch.Tensor, right: Array) -> float:
    assert found.shape == right.shape
    return float(np.abs(found.numpy() - right).max())


@pytest.mark.parametrize("side", ["reference", "optimized"])
def test_three_mtp_layers_draft_as_they_are_defined(side: str, tmp_path: Path) -> None:
    """After a prompt, after two accepted drafts of three, and after none of two: fewer steps than layers."""
    folder = write(tmp_path / "model", seed=3, **SHAPE, mtp_num_hidden_layers=3)
    subject, witness = engine(side, folder, "vanilla"), Witness(folder)
    serve(subject, Admit("a", PROMPT), Forward((Row("a", "prefill", len(PROMPT), ROOT),)))
    tokens, drafts = [*PROMPT], witness.extend(witness.run(PROMPT)[0], (*PROMPT[1:], ROOT), 3)
    for steps, picks, taken, bonus in ((3, (4, 8, 2), 2, 6), (2, (1, 19), 0, 12), (1, (7,), 1, 3)):
        serve(subject, SetNumSteps(steps))
        root = subject.state("a").root
        said = serve(subject, Draft(("a",), (picks,)))
        assert said.own[0].tolist() == drafts[:steps]
        serve(subject, Forward((Row("a", "verify"),)), Commit(("a",), (Way(tuple(range(1, taken + 1)), bonus),)))
        accepted = [root, *picks[:taken]]
        tokens += accepted
        final = witness.run(tokens)[0][-len(accepted) :]
        drafts = witness.extend(final, [*accepted[1:], bonus], steps)
        state = subject.state("a")
        for layer in range(3):
            assert off(state.draft_keys[layer], witness.head(layer)[1]) <= CLOSE, (steps, layer)
        assert off(state.proposal_hidden, witness.head(0)[0][-1]) <= CLOSE
        assert state.proposal == drafts[0]


@pytest.mark.parametrize("side", ["reference", "optimized"])
@pytest.mark.parametrize("gate", ["sigmoid", "silu"])
def test_the_gated_norm_uses_the_gate_of_the_configuration(side: str, gate: str, tmp_path: Path) -> None:
    """Layer 1 sees what layer 0 let through; the state of layer 0 does not depend on it."""
    folder = write(tmp_path / "model", **SHAPE, mtp_num_hidden_layers=0, output_gate_type=gate)
    subject, witness = engine(side, folder, "external"), Witness(folder)
    serve(subject, Admit("a", PROMPT))
    picked = serve(subject, Forward((Row("a", "prefill", len(PROMPT)),))).own["a"].tolist()
    final, states = witness.run(PROMPT)
    state = subject.state("a")
    assert picked == [witness.pick(final[-1])]
    assert off(state.state[0], states[0]) <= CLOSE
    assert off(state.keys[1], witness.keys(PROMPT, 1)) <= CLOSE
