"""Check the arguments of the kit's functions: one `BadInput` names the parameter, or the most similar known name.

Leaves out: values of options (`setting.py`), and numbers of a model (`ModelConfig`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches

from instep_reference.contract.errors import BadInput

from ..options import OPTIONS, either

INSTEAD = {"ops": "subject", "handed": "subject"}  # names of the same parameter in other functions
CLOSE = 0.5  # of `difflib`: how similar a name must be to be proposed


def must_be_known(given: Iterable[str], known: Collection[str], of: str, also: Iterable[str] = ()) -> None:
    """Refuse a parameter that `of` does not have or read. also: further names that the user may have meant."""
    for name in given:
        if name not in known:
            near = get_close_matches(name, {*known, *also} - {name}, 1, CLOSE)
            right = INSTEAD.get(name) or next(iter(near), either(sorted(known)))
            raise BadInput(name, found=f"no parameter of {of}", expected=right)


def must_be(name: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Refuse a value of another type. True and False do not count as numbers."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise wrong(name, value, expected)


def must_be_several(name: str, values: object, kind: type, expected: str) -> None:
    """Refuse a value that is not a sequence of this type. A string counts as one value."""
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise wrong(name, values, expected)
    for number, value in enumerate(values):
        must_be(f"{name}[{number}]", value, kind, expected)


def must_be_setting(setting: Mapping[str, object], of: str, also: Iterable[str]) -> None:
    """Refuse unknown options and values of a wrong type. also: the other parameters of the function `of`."""
    options = {name: kind for name, (kind, _) in OPTIONS.items() if name != "ops"}
    must_be_known(setting, options, of, also)
    for name, value in setting.items():
        if value is not None:
            must_be(name, value, options[name], "True or False" if options[name] is bool else "a text")


def wrong(name: str, value: object, expected: str) -> BadInput:
    said = repr(value)
    return BadInput(name, found=f"{said[:60]}{'...' * (len(said) > 60)} ({type(value).__name__})", expected=expected)
