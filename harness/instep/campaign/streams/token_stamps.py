"""A stamp: the request of a token, its position, whether it is a rejected draft; and the code of a stamp.

A code is a row of small integers, which are exact in every dtype down to bf16. It differs in every head and layer, so a
row that was read from a wrong head or layer is visible. Leaves out: the places of stamps in a model (`stamp_model.py`).
"""

from dataclasses import dataclass

import torch

from instep_reference.contract.errors import BadInput

DIGIT = 16  # values of a digit; a column holds 1 to 16, so that 0 is nothing
DIGITS = ("request", "position % 16", "position // 16", "rejected")
WIDTH = 16  # columns of a code: digits, head, layer, two constants, and all that once more, backwards
KEYS = 16  # keys: a state holds the last 16 positions, one row each
MOST_REQUESTS, MOST_POSITIONS = DIGIT, DIGIT * DIGIT


@dataclass(frozen=True)
class Stamp:
    """`request`: its number in the order of admission."""

    request: int
    position: int
    rejected: bool = False

    @property
    def token(self) -> int:
        """Its id in the vocabulary."""
        return (self.request * MOST_POSITIONS + self.position) * 2 + self.rejected

    @classmethod
    def of(cls, token: int) -> "Stamp":
        number, rejected = divmod(token, 2)
        return cls(*divmod(number, MOST_POSITIONS), bool(rejected))

    @property
    def digits(self) -> tuple[int, ...]:
        return (self.request, self.position % DIGIT, self.position // DIGIT, int(self.rejected))

    @property
    def key(self) -> int:
        return self.position % KEYS


def vocabulary(requests: int) -> int:
    """The number of tokens that this many requests need."""
    if requests > MOST_REQUESTS:
        raise BadInput("trace", found=f"{requests} requests", expected=f"at most {MOST_REQUESTS} for exact streams")
    return requests * MOST_POSITIONS * 2


def columns(head: int, layer: int) -> tuple[tuple[str, int], ...]:
    """The content of each column of a code: ("digit", which) or ("constant", its value)."""
    once = [*(("digit", which) for which in range(len(DIGITS))), ("constant", head + 1), ("constant", layer + 1),
            ("constant", 1), ("constant", 2)]  # fmt: skip
    return (*once, *reversed(once))


def code(stamp: Stamp, head: int, layer: int) -> list[int]:
    """The row of numbers for a stamp in this head of this layer."""
    return [stamp.digits[n] + 1 if kind == "digit" else n for kind, n in columns(head, layer)]


def decoded(row: torch.Tensor, head: int, layer: int) -> Stamp | None:
    """The stamp of a row [16]; None if the row is no code, as where a number is no whole one or not finite."""
    numbers: list[float] = row.double().tolist()
    if not all(number.is_integer() for number in numbers):
        return None
    request, low, high, rejected = (int(number) - 1 for number in numbers[: len(DIGITS)])
    if not (0 <= request < DIGIT and 0 <= low < DIGIT and 0 <= high < DIGIT and rejected in (0, 1)):
        return None
    stamp = Stamp(request, high * DIGIT + low, bool(rejected))
    return stamp if numbers == code(stamp, head, layer) else None
