"""Record the calls of a function, which are made all the same."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest


def calls_of(
    patch: pytest.MonkeyPatch, owner: Any, name: str, key: Callable[..., Any] = lambda *given, **_: given
) -> Any:
    """From now on a list has what `key` makes of the arguments of every call; None is left out."""
    calls, real = list[Any](), getattr(owner, name)

    def noted(*given: Any, **named: Any) -> Any:
        calls.extend([] if (found := key(*given, **named)) is None else [found])
        return real(*given, **named)

    patch.setattr(owner, name, noted)
    return calls


launches = partial(calls_of, name="launch", key=lambda kernel, *_, **__: kernel.__name__)  # names of a module's
