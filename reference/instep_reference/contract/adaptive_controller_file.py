"""The adaptive file of every dialect of controllers: its fields, its default tables, and what is refused.

`AdaptiveFile.read(text, dialect)` reads and refuses. Leaves out every computation: the rules that use the fields are
the text of `contract/controllers.py`.

sglang-0.5.12
  A JSON object with the fields of `Bracket`, or an object of such objects under batch-size keys (decimal integers,
  at least 1). A flat object is one bracket for every batch size. An unknown field is refused.

sglang-0.5.13 and sglang-0.5.14 (`srt/speculative/adaptive_spec_params.py` of SGLang 0.5.13 to 0.5.23)
  A JSON object. A key of decimal digits ("0" included) is a slot. Its value is an object with `candidate_steps`, a list
  of at least one integer, and any further fields of `Slot`. There is at least one slot. A boolean counts as an integer.
  Every other key of the file that is a field of `Slot` is the default of that field for all slots, except
  `candidate_steps`. A field of the slot wins over the default of the file, and this wins over the default of `Slot`.
  Unknown keys are ignored, in the file and in slots.
  The counts are at least 1 in sglang-0.5.13, and at least 0 in sglang-0.5.14.
  instep also refuses what the release reads and cannot use: a key or slot that occurs twice, a field of a slot that is
  not a number, an `update_interval` below 1, a number that is not finite.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import msgspec

from .errors import BadInput, bytes_of

Dialect = Literal["sglang-0.5.12", "sglang-0.5.13", "sglang-0.5.14", "vllm-table", "constant"]
DIALECTS: tuple[Dialect, ...] = get_args(Dialect)
FLAT: Dialect = "sglang-0.5.12"
FEWEST: Mapping[Dialect, int] = {"sglang-0.5.13": 1, "sglang-0.5.14": 0}  # dialects with slots: their smallest count
T = TypeVar("T", bound=msgspec.Struct)
LONGEST_KEY = 9  # digits of a batch size

# The files that a release uses when it gets none, by the first release that has them.
_EASY, _EVEN = {"up_hysteresis": 0.0, "down_hysteresis": -0.25}, {"up_hysteresis": 0.0, "down_hysteresis": 0.0}
DEFAULT_FILES: Mapping[str, dict[str, Any]] = {
    "0.5.12": {},
    "0.5.13": {"1": {"candidate_steps": [1, 3, 7], **_EASY}, "8": {"candidate_steps": [1, 3], **_EVEN},
               "32": {"candidate_steps": [1], **_EVEN}},
    "0.5.14": {"1": {"candidate_steps": [1, 3, 7], **_EASY}, "8": {"candidate_steps": [0, 1, 3], **_EVEN},
               "32": {"candidate_steps": [0, 1], **_EVEN}, "64": {"candidate_steps": [0], **_EVEN}},
    "0.5.20": {"1": {"candidate_steps": [1, 3, 5, 7], **_EASY}, "8": {"candidate_steps": [0, 1, 3], **_EVEN},
               "32": {"candidate_steps": [0, 1], **_EVEN}, "64": {"candidate_steps": [0], **_EVEN}},
}
# SGLang's releases: the dialect, and the first release with the same default file.
RELEASES: Mapping[str, tuple[Dialect, str]] = {
    "0.5.12": ("sglang-0.5.12", "0.5.12"), "0.5.13": ("sglang-0.5.13", "0.5.13"),
    **{f"0.5.{n}": ("sglang-0.5.14", "0.5.14" if n < 20 else "0.5.20") for n in range(14, 24)},
}

class Bracket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Fields of the file for one range of batch sizes. `candidate_steps` is None if the file does not have it."""

    candidate_steps: tuple[int, ...] | None = None
    ema_alpha: float = 0.2
    warmup_batches: int = 10
    update_interval: int = 5
    down_hysteresis: float = -0.25
    up_hysteresis: float = 0.0


class Slot(msgspec.Struct, frozen=True, omit_defaults=True):
    """Fields of one slot, with the defaults of the file filled in."""

    candidate_steps: tuple[int, ...]
    ema_alpha: float = 0.2
    update_interval: int = 5
    warmup_batches: int = 10
    down_hysteresis: float = -0.25
    up_hysteresis: float = 0.0
    ceiling_coeff: float = 0.0


class AdaptiveFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The file: `flat`, or `by_batch` under batch-size keys, as written (sglang-0.5.12); or `slots` by their keys."""

    flat: Bracket | None = None
    by_batch: dict[int, Bracket] = {}
    slots: dict[int, Slot] = {}

    @classmethod
    def open(cls, path: Path, dialect: Dialect = FLAT) -> "AdaptiveFile":
        """Read a file. Errors name its path."""
        return cls.of(cls.json(path), dialect, str(path))

    @classmethod
    def json(cls, path: Path) -> Any:
        """Parse a file, without a dialect. Errors name its path."""
        return _parsed(bytes_of(path), str(path))

    @classmethod
    def read(cls, text: str | bytes, dialect: Dialect = FLAT, field: str = "adaptive") -> "AdaptiveFile":
        """Read JSON text. Errors name `field` as the place of the text."""
        return cls.of(_parsed(text, field), dialect, field)

    @classmethod
    def of(cls, value: Any, dialect: Dialect = FLAT, field: str = "adaptive") -> "AdaptiveFile":
        """Read parsed JSON."""
        if not isinstance(value, dict):
            raise BadInput(field, found=type(value).__name__, expected="an object")
        if dialect in FEWEST:
            return cls(slots=_slots(value, FEWEST[dialect], field))
        if dialect != FLAT:
            raise BadInput(field, found=f"a file for {dialect}", expected="no file: this controller reads none")
        if not value or not all(isinstance(inner, dict) for inner in value.values()):
            return cls(flat=_bracket(value, field))
        return cls(by_batch={_batch(key, field): _bracket(inner, f"{field}.{key}") for key, inner in value.items()})

    def written(self) -> dict[str, Any]:
        """Convert back to plain JSON values."""
        if self.slots:
            return {str(key): msgspec.to_builtins(slot) for key, slot in self.slots.items()}
        if self.flat is not None:
            return dict(msgspec.to_builtins(self.flat))
        return {str(batch): msgspec.to_builtins(bracket) for batch, bracket in self.by_batch.items()}


def _slots(value: dict[str, Any], fewest: int, field: str) -> dict[int, Slot]:
    """Read slots in the order of the file. `fewest`: the smallest step count that the dialect allows."""
    keys = [key for key in value if key.isascii() and key.isdigit()]
    if not keys:
        raise BadInput(field, found="no slot", expected='at least one batch size as key, as in {"1": '
                       '{"candidate_steps": [1, 3, 7]}}', hint="a file without slots is one of SGLang 0.5.12")
    defaults = {name: value[name] for name in Slot.__struct_fields__ if name in value and name != "candidate_steps"}
    slots: dict[int, Slot] = {}
    for key in keys:
        entry, at = value[key], f"{field}.{key}"
        if len(key) > LONGEST_KEY or int(key) in slots:
            found = f"{key}, the slot {int(key)} again" if len(key) <= LONGEST_KEY else key
            raise BadInput(at, found=found, expected=f"each slot once, with at most {LONGEST_KEY} digits")
        steps = entry.get("candidate_steps") if isinstance(entry, dict) else None
        if not (isinstance(steps, list | tuple) and steps and all(isinstance(n, int) and n >= fewest for n in steps)):
            raise BadInput(f"{at}.candidate_steps", found=steps if isinstance(entry, dict) else entry,
                           expected=f"a list of integers of at least {fewest}")  # fmt: skip
        slots[int(key)] = _converted({**defaults, **entry, "candidate_steps": [int(n) for n in steps]}, Slot, at)
        _finite(slots[int(key)], at)
    return slots


def _bracket(value: dict[str, Any], field: str) -> Bracket:
    bracket = _converted(value, Bracket, field)
    _within(bracket, field)
    return bracket


def _converted(value: dict[str, Any], kind: type[T], field: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `$")
        expected, _, found = text.partition(", got ")
        place = f"{field}{where.rstrip('`')}"
        if not found:
            hint = 'SGLang 0.5.13 and later read such a file: dialect "sglang-0.5.14"' if _like_slots(value) else ""
            raise BadInput(place, found=text, expected=f"fields among {', '.join(kind.__struct_fields__)}",
                           hint=hint) from None  # fmt: skip
        raise BadInput(place, found=found, expected=expected.removeprefix("Expected ")) from None


def _like_slots(value: dict[str, Any]) -> bool:
    """Whether a flat file, or one bracket, has what only files with slots have."""
    return "ceiling_coeff" in value or any(key.isdigit() for key in value)


def _finite(slot: Slot, field: str) -> None:
    """Refuse numbers with which the rules of a slot cannot be computed."""
    for name in ("ema_alpha", "down_hysteresis", "up_hysteresis", "ceiling_coeff"):
        if not math.isfinite(getattr(slot, name)):
            raise BadInput(f"{field}.{name}", found=getattr(slot, name), expected="a finite number")
    if slot.update_interval < 1:
        raise BadInput(f"{field}.update_interval", found=slot.update_interval, expected="at least 1")


def _within(bracket: Bracket, field: str) -> None:
    """Check the ranges of values. They are not in the schema, because its messages would be less clear."""
    steps = bracket.candidate_steps
    rules = (
        ("candidate_steps", steps, steps is None or (len(steps) > 0 and min(steps) >= 0), "step counts of at least 0"),
        ("ema_alpha", bracket.ema_alpha, 0 < bracket.ema_alpha <= 1, "a number above 0 and at most 1"),
        ("warmup_batches", bracket.warmup_batches, bracket.warmup_batches >= 0, "at least 0"),
        ("update_interval", bracket.update_interval, bracket.update_interval >= 1, "at least 1"),
        ("down_hysteresis", bracket.down_hysteresis, math.isfinite(bracket.down_hysteresis), "a finite number"),
        ("up_hysteresis", bracket.up_hysteresis, math.isfinite(bracket.up_hysteresis), "a finite number"),
    )
    for name, found, holds, expected in rules:
        if not holds:
            raise BadInput(f"{field}.{name}", found=found, expected=expected)


def _batch(key: str, field: str) -> int:
    if not (key.isascii() and key.isdigit() and not key.startswith("0") and len(key) <= LONGEST_KEY):
        raise BadInput(f"{field}.{key}", found=repr(key), expected="a batch size of at least 1 as key")
    return int(key)


def _parsed(text: str | bytes, field: str) -> Any:
    try:
        value = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, field))
        msgspec.json.encode(value)  # raises if a text has half a surrogate pair
        return value
    except (ValueError, RecursionError) as error:
        raise BadInput(field, found=f"text that does not parse ({error})", expected="JSON") from None


def _unique(pairs: list[tuple[str, Any]], field: str) -> dict[str, Any]:
    """Refuse a key that occurs twice. JSON allows it, and the parser would silently take the last one."""
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise BadInput(f"{field}.{key}", found=f"{keys.count(key)} times", expected="once")
    return dict(pairs)
