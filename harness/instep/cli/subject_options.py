"""The options that set up the engine under test, as parameters of a command.

Leaves out: their names and help texts (`instep.options`), their effect (`instep.setting`), and torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from instep_reference.contract.errors import BadInput

from ..options import CHOICES, OPTIONS, SOMETIMES, USUAL, known

if TYPE_CHECKING:
    from ..setting import Setting
import functools
import inspect
from collections.abc import Sequence
from operator import getitem

PANEL = "Engine under test"  # in `--help`; typer prints it after a command's own options
WIDEST_METAVAR = 8

# Options of several commands.
TraceModel = Annotated[Path | None, typer.Option(
    "--model", "--checkpoint", help="The model; default: the trace's model.")]
Model = Annotated[Path | None, typer.Option(
    "--model", "--checkpoint", help="A Hugging Face checkpoint directory; default: instep's model.")]
Until = Annotated[int | None, typer.Option(help="Stop after this event.", min=0)]
Layers = Annotated[list[int] | None, typer.Option(help="Judge only this layer; may be repeated.", min=0)]


@dataclass(frozen=True)
class Given:
    """The typed options: field of `Setting` -> its value, or the values of a repeatable option."""

    named: Mapping[str, Any]

    def several(self, field: str, *otherwise: str) -> tuple[str, ...]:
        """The distinct values of a repeatable option, in their order; by default `otherwise`."""
        return tuple(dict.fromkeys(self.named.get(field) or otherwise))

    def subjects(self, *otherwise: str) -> tuple[str, ...]:
        """The named op sets; by default `otherwise`. An engine driven through callbacks is one run."""
        if "engine" not in self.named:
            return self.several("ops", *otherwise)
        if "ops" in self.named:
            raise BadInput("--engine", found="--ops as well", expected="one of the two")
        return ("plain",)

    def left_to_draw(self, sampled: Collection[str]) -> list[str]:
        """The fields among `sampled` that were not typed, so that a campaign draws them; none of a typed engine."""
        return [name for name in sampled if name not in self.named and "engine" not in self.named]

    def setting(self, **otherwise: Any) -> Setting:
        """The typed setting; `otherwise` has the values of options that were not typed, None: the defaults.

        A repeatable option is in `otherwise`, one of its values at a time.
        """
        from ..setting import Setting

        once = {name: value for name, value in self.named.items() if not isinstance(value, list)}
        return Setting.of(**{**otherwise, **once})


def named(values: Collection[str]) -> str:
    """A closed list of values for `--help`. A long one would leave no room for the text on a narrow terminal.

    The word must differ from the option's name: typer 0.27.0 loses an option whose metavar is its name in capitals.
    """
    listed = "|".join(values)
    return listed if len(listed) <= WIDEST_METAVAR else "TYPE"


def takes_setting(
    *, several: Collection[str] = (), without: Collection[str] = (), also: Collection[str] = (), **says: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of a setting; its parameter `given` receives the typed ones.

    several: repeatable options; without: options that do not apply; also: options that only some commands have;
    says: other help texts
    """

    names = [name for name in OPTIONS if name not in without and (name not in SOMETIMES or name in also)]

    def given(typed: Mapping[str, Any]) -> Given:
        for name, value in typed.items():
            if isinstance(value, str):
                known(name, value)  # refused before the command loads torch
        return Given({name: value for name, value in typed.items() if value is not None})

    return with_parameters("given", [_option(name, name in several, says.get(name)) for name in names], given)


def _option(name: str, repeated: bool, says: str | None) -> Parameter:
    once, usual = OPTIONS[name]
    text, kind = says or usual, cast(Any, once)
    if repeated:
        text, kind = f"{text.rstrip('.')}; may be repeated.", GenericAlias(list, once)
    choices = CHOICES.get(name, USUAL.get(name, ()))
    how: Any = typer.Option(
        help=text, show_default=False, rich_help_panel=PANEL, metavar=named(CHOICES[name]) if name in CHOICES else None,
        autocompletion=(lambda: choices) if choices else None,
    )
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotated(kind, how))


# ---- options that several commands share: they are added to a signature, and one parameter receives all values

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
