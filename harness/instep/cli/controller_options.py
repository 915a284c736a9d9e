"""The options of a step controller: its file, its dialect, and the batch sizes of its engine's graphs.

Leaves out: the rules of dialects (`instep_reference.contract.controllers`). This file does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from instep_reference.contract.errors import BadInput

if TYPE_CHECKING:
    from instep_reference.contract.controllers import Controlled

Adaptive = Annotated[Path | None, typer.Option(help="File of a step controller, as SGLang or vLLM takes it (JSON).")]
DialectOption = Annotated[str | None, typer.Option(metavar="NAME", help=(
    "Whose controller: sglang-0.5.12 (the default with --adaptive), sglang-0.5.13, sglang-0.5.14 (to 0.5.23), "
    "vllm-table or constant. Without --adaptive: the default file of its newest release."))]
Captured = Annotated[str | None, typer.Option(metavar="SIZES", help="Batch sizes of that engine's decode graphs, as "
                                                                   "1,2,4,8 (sglang-0.5.13 and later).")]  # fmt: skip


@dataclass(frozen=True)
class Steps:
    """The initial step count, and a controller: the file of SGLang 0.5.12 as written, or another dialect."""

    num_steps: int
    adaptive: dict[str, Any] | None = None
    controller: Controlled | None = None


def chosen(num_steps: int | None, adaptive: Path | None, dialect: str | None, captured: str | None) -> Steps | None:
    """Read the options; None: none of a controller is given. num_steps: the initial count, if that is given."""
    from msgspec import ValidationError, convert

    from instep_reference.contract.adaptive_controller_file import DIALECTS, FLAT, AdaptiveFile
    from instep_reference.contract.controllers import Controlled
    from instep_reference.controllers import controller

    if adaptive is None and dialect is None:
        if captured is not None:
            raise BadInput("--captured", found="no controller", expected="--dialect sglang-0.5.13 or later")
        return None
    known = next((one for one in DIALECTS if one == (dialect or FLAT)), None)
    if known is None:
        raise BadInput("--dialect", found=dialect, expected=f"one of {', '.join(DIALECTS)}")
    written = None if adaptive is None else AdaptiveFile.json(adaptive)
    sizes = _sizes(captured)
    if known == FLAT:
        file = AdaptiveFile.of({} if written is None else written, FLAT, str(adaptive))
        Controlled(known, sizes).check(0, "--dialect")
        return Steps(_smallest(file) if num_steps is None else num_steps, file.written())
    if known == "vllm-table":
        try:
            table = convert(written, tuple[tuple[int, int, int], ...])
        except ValidationError as error:
            raise BadInput(str(adaptive or "--adaptive"), found="nothing" if written is None else str(error),
                           expected="a list of [from, to, drafts], as num_speculative_tokens_per_batch_size") from None
        most = num_steps or max((drafts for *_, drafts in table), default=0)
        controlled = Controlled(known, sizes, table=table, num_speculative_tokens=most)
    else:
        if written is not None:
            AdaptiveFile.of(written, known, str(adaptive))  # errors name the file
        controlled = Controlled(known, sizes, file=written)
    controlled.check(num_steps, "--dialect")
    return Steps(controller(controlled, num_steps).initial, None, controlled)


def _smallest(file: Any) -> int:
    """The smallest count above 0 that the brackets of a file name."""
    from instep_reference.controllers.sglang_0_5_12 import DEFAULT_STEPS

    brackets = [one for one in (file.flat, *file.by_batch.values()) if one is not None]
    return min((n for one in brackets for n in one.candidate_steps or DEFAULT_STEPS if n), default=0)


def _sizes(captured: str | None) -> tuple[int, ...]:
    parts = [] if captured is None else captured.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise BadInput("--captured", found=captured, expected="batch sizes, as 1,2,4,8")
    return tuple(sorted({int(part) for part in parts}))
