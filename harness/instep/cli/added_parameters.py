"""Options that several commands share: they are added to a command's signature, and one parameter receives all values.

Leaves out: the options (`subject_options.py`, `finish_with_result.py`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Annotated, Any, cast


def with_parameters(
    name: str, added: Sequence[inspect.Parameter], make: Callable[[Mapping[str, Any]], object]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the parameter `name` of a command by other ones; it receives what `make` makes of their values."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)

        @functools.wraps(command)
        def run(**typed: Any) -> None:
            received = make({each.name: typed.pop(each.name) for each in added})
            command(**typed, **{name: received})

        every = list[inspect.Parameter]()
        for each in own.parameters.values():
            every += added if each.name == name else [each.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
        run.__signature__ = own.replace(parameters=every)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in every}
        return run

    return decorate


def annotated(kind: Any, how: object) -> Any:
    """An optional type with typer's description.

    Built at run time, so no checker can read it as a type. Python 3.13 has no `Annotated.__class_getitem__`.
    """
    return getitem(cast(Any, Annotated), (kind | None, how))
