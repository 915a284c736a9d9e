"""Forwards of windows alone, of decodes alone, and of both, in which a decode has the rows of a window.

So a proposer that finds nothing for some requests costs neither a second pass over the weights nor a forward outside of
graphs. Leaves out: forwards with prompts (`forward_with_prefill_chunks.py`), and the bodies
(`round_for_step_count.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .forward_with_prefill_chunks import Planned
from .round_for_step_count import BESIDE
from .sampling_inputs import in_units
from .transfer.to_device import ints

WINDOWS, DECODES = frozenset(("verify",)), frozenset(("decode",))
BOTH = WINDOWS | DECODES


@dataclass(frozen=True)
class Forwards:
    """run: runs one body in the engine;  width: packed rows of the widest window"""

    run: Callable[..., Any]
    width: int

    def windows(self, plan: Sequence[Planned]) -> torch.Tensor:
        """Run windows -> the target's own choice at every row, in batch order."""
        own: torch.Tensor = self._run("verify", plan, (), self.width).picks.flatten()
        shorter = any(p.span.count < self.width for p in plan)
        return own[self._spots(plan, own.device)] if shorter else own

    def decodes(self, plan: Sequence[Planned]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run decodes -> the target's own choices, and the roots that are now in force."""
        own, roots = self._run("decode", plan, [[p.forced] for p in plan], 1)
        return own, roots

    def both(self, plan: Sequence[Planned]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run both -> own choices at every row, in batch order, and the roots of the decodes.

        The results are those of `forward_with_prefill_chunks.forward`.
        """
        kinds = [p.span.kind for p in plan]
        picks, roots = self._run(BESIDE, plan, [[p.forced] for p in plan], self.width, kinds)
        decoded = [number for number, kind in enumerate(kinds) if kind == "decode"]
        return picks.flatten()[self._spots(plan, picks.device)], roots[ints(decoded, roots.device)]

    def _spots(self, plan: Sequence[Planned], device: torch.device) -> torch.Tensor:
        """Locate the rows that are used among those of windows of full width."""
        return ints([number * self.width + row for number, p in enumerate(plan) for row in range(p.span.count)], device)

    def _run(
        self, kind: str, plan: Sequence[Planned], forced: Sequence[Sequence[int]], width: int,
        kinds: Sequence[str] = (),
    ) -> Any:
        return self.run(kind, [p.request for p in plan], forced, rows=[p.span.row for p in plan],
                        uniforms=in_units([p.row for p in plan], width), kinds=kinds)  # fmt: skip
