"""`instep doctor`: list the installed parts, and what does not work without the missing ones.

Leaves out: installing them.
"""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

# package -> what does not work without it
NEEDED_FOR = {
    "torch": "everything",
    "safetensors": "reading checkpoints and traces",
    "msgspec": "reading traces",
    "triton": "the op set triton",
    "hypothesis": "instep fuzz",
    "pytest": "the pytest plugin",
    "fla": "the op set fla (pip install fla-core einops)",
    "einops": "the op set fla",
    "transformers": "the tests against transformers (extra: oracle)",
}
DISTRIBUTED_AS = {"fla": "fla-core"}  # modules whose package has another name
CPU = "cpu, no CUDA device"  # then the missing part is a card
ON_A_CARD = "--device cuda and native kernels"
REQUIRED = ("torch", "safetensors", "msgspec")
SUPPORTED = ((3, 11), (3, 14))  # from, up to but excluding


def doctor(
    json: Annotated[Path | None, typer.Option(help="Write the findings there, too; - is stdout.")] = None,
) -> None:
    """Print the installed parts, and what does not work without the missing ones."""
    from rich.console import Console

    found = findings()
    code = 2 if any(found[package] is None for package in REQUIRED) else 0
    if json is not None:
        from ..report.result import Result

        Result(code, "cpu", {"found": found}).write(json)
    _show(found, Console())
    raise typer.Exit(code)


def findings() -> dict[str, str | None]:
    """Map each part to its version or kind; None if it is missing."""
    from ..report.machine import installed, system

    found: dict[str, str | None] = {"python": platform.python_version(), "system": system()}
    for package in NEEDED_FOR:
        here = importlib.util.find_spec(package) is not None
        found[package] = (installed(DISTRIBUTED_AS.get(package, package)) or "here, version unknown") if here else None
    found["instep"] = installed("instep") or "from source"
    found["device"] = _device() if found["torch"] else None
    found["kernels"] = _kernels() if found["torch"] and found["triton"] else None
    return found


def _show(found: dict[str, str | None], console: Console) -> None:
    from ..report import terminal_tables

    made = terminal_tables.table("", {"part": "word", "found": "text", "missing for": "text"})
    for part, value in found.items():
        lacks = ON_A_CARD if value == CPU else "" if value else NEEDED_FOR.get(part, "")
        made.add_row(part, value or "[red]missing[/red]", lacks)
    terminal_tables.show(made, console)
    low, high = SUPPORTED
    version = tuple(map(int, platform.python_version_tuple()[:2]))
    if not low <= version < high:
        terminal_tables.say(console, f"Python {low[0]}.{low[1]} up to {high[0]}.{high[1] - 1} is supported")


def _device() -> str:
    import torch

    if not torch.cuda.is_available():
        return CPU
    count = torch.cuda.device_count()
    return f"{count} x {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"


def _kernels() -> str:
    """How Triton runs its kernels here: natively, or in its interpreter."""
    import torch

    return "native" if torch.cuda.is_available() else "interpreted by Triton"
