"""Every constant of the tiers T2, T2d, T3 and T4, each with its derivation; nothing here is tuned per run.

Leaves out: how errors are measured (`measure.py`, `directed.py`).
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

Errors = TypeVar("Errors", torch.Tensor, npt.NDArray[np.float64])

# T2, T3. An error may be this many times the error that the yardstick makes on the same block. The yardstick's draws
# stand for the worst order of summation (`observe/reorder.py`), a subject's own order errs as much or less. So both
# errors are normal with at most the same deviation: the norm of a block of 32 numbers scatters by 1/sqrt(2 * 32) = 12%,
# 3 is out of reach. Where a block hangs on one number, the largest of 16 draws is exceeded 3 times by 1 in 31 000.
YARDSTICK_FACTOR = 3.0

# Products that a subject declares to be narrower change the yardstick, never a constant: see `observe/products.py`.

# T2, T3. Added in units of the last place (`finfo.eps`) of the stored dtype: one rounding of either side into
# storage, one of each side's last operation; where the yardstick happens to be exact, this alone remains.
ULPS = 4.0

# T2, from an op's own inputs. The same two constants, of one op: truth and draws both read the subject's own rows, so
# whatever was rounded before the op is in what both read, and in the error of neither. Nothing is amplified through
# other ops, so 4 draws do. What a block of one op has in common is a factor of a norm, a decay or a gate: a function or
# two, each within 2 units (`observe/reorder.py`), which ULPS grants by itself. Only a softmax that wavers between two
# keys, or two experts, hangs on the error of one score, which grows with the score: there the draws stay as many.
# The read-out of the delta rule (`ROUNDED_ONCE`) is held tighter where it is stored in 16 bits. There ULPS would grant
# 4 units, of which one rounding needs half a unit. So the draws are taken before they are rounded into storage, and
# what was found is moved towards the truth o by half a unit at most. Let y be what the subject had before it rounded:
#     |round(y) - o| - half a unit  <=  |y - o|        a unit of storage, where the larger of the two numbers stands
# for every number, so what is left of a correct engine's error is no larger than its error before storage. That is
# judged in the width: 3 e_r + 4 ulp of it. Other places keep the 4 units of their storage: an attention's chances, an
# MLP's middle and a split product's parts may be rounded on the way, and nobody declares that. For a state that is
# stored narrower than it runs the read-out keeps them, too: some store it after every token.

# T2, of what is stored in tiles with a scale each (`Blocked`; states in fp8). ULPS would grant 4 units of 2^-3, half of
# the number. A state is rounded once, where it is stored, so it is held as what is rounded once is held above: what was
# found is moved towards the truth by half a unit at most, and what is left is judged at 3 e_r + 4 ulp of fp32. The unit
# is that of the larger of the two numbers, in the larger of the two scales: both sides take a scale from their own
# largest number, and these differ by what differed before the store. A division by the scale and a product with it,
# which storage adds to the rounding, are within 1 ulp of fp32 each.

# Blocks whose largest number is below this have lost bits to underflow and have no relative error:
# the smallest normal number of fp32 (and of bf16, which has the same exponents) over the precision of fp32.
SCALE_FLOOR = torch.finfo(torch.float32).tiny / torch.finfo(torch.float32).eps

# Blocks smaller than this are judged together: the norm of fewer than 32 draws is no measurement (see above).
SMALLEST_BLOCK = 32

# T3. How often the rounded run is drawn again before an error counts. That helps only as far as draws are apart. Sums
# in another order move a number by some units of 2^-24: stored or multiplied in 16 bits, nearly all numbers round as
# before, and in a model of few channels 8 draws are one and the same. So in every further draw declared roundings fall
# by chance (`up_or_down`). Two such draws share no rounding. The mean square of a rounding is then the mean of
# f (1 - f), 1/6 of a squared unit; to nearest it is 1/12. So they err sqrt(2) times as much as a correct engine does.
# Where all of an error hangs on one number (a layer makes every error 10 times larger), the error of a correct engine
# exceeds 3 times the largest of 7 such draws once in 5000; where nothing is rounded to less than the width, that of 8
# equal ones once in 1100; that of one draw once in 5. Measured in a random model of 4 layers in bf16 as our kernels
# round, at its third event, of 150 engines that err as these draws do: 8 draws to nearest call 68 wrong, these none.
# A draw that is 3 * 100 times too small is no luck (1 in 500, at the worst): such an error is called wrong at once.
REDRAWS, LUCK = 7, 100.0

# T3. The truth's own error: fp64 agrees with itself in another order within this (the reference's properties).
TRUTH_ERROR = 1e-12

# T2d. Columns of V that are judged together: the narrowest tile in which kernels write a state. V columns of a
# state evolve independently, so one stale tile is a wrong state within its columns and a right one elsewhere.
COLUMNS = 8

# T2d. The projection of the error on (wrong - right): 0 is right, 1 is wrong, and half way decides.
# A whole wrong state projects to 1.00; what correct engines come to is measured (`fixtures/results/calibration.json`).
PROJECTION_LIMIT = 0.5

# T2d. The largest standard error of a projection at which it decides: the limit then stands 8 of them from 0.
# A correct engine's projection is a sum of many roundings, each times what it moves the state along that direction. A
# draw in which roundings fall by chance (`up_or_down`) gives each a deviation that is no smaller than the error which
# rounding to nearest makes, so by Hoeffding's bound (signs fall evenly) a correct one passes t deviations of such draws
# with a chance under exp(-t^2 / 2): 1e-14 at 8. The deviation itself is measured from 128 draws before anything is
# called wrong. For a pair of a block and a wrong state that suits a mistake best, whose deviation is too large to
# decide but by luck is measured as small enough, the chance is 7.5e-13 (of 16 draws alone it would be 4e-7). A long run
# of a model of 9B judges some 4e7 pairs, of which 1 in 100 lies so near to this limit (measured): 3e-7 false alarms in
# a run.
PROJECTION_ERROR = 1 / 16

# T2d. Where operands of products may be cut off (tf32; `observe/products.py`) errors of correct engines have a mean,
# and yardsticks that cut show it. A wrong state is decided only while the limit stands 8 standard errors beyond this
# many times the mean: once for a kernel that cuts as the yardstick does, twice for one whose formula meets other
# operands on its way.
LEANING = 2.0

# T2d. Correct states drawn to measure that error where yardsticks share their roundings; and before anything is wrong.
DITHERED, MORE_DRAWS = 16, 128

# T2d. At most this part of an event's pairs of block and wrong state may be undecidable: above it nobody looked. A
# state stored in bf16 cannot tell a decay of 0.9999 from 1 (three of the bank's states: dropped, doubled, stale gate).
# A chosen bound; the part that correct engines leave undecided is measured, too.
UNDECIDED_CAP = 0.5

# T2, T2d. A tensor is named after a wrong one that it stands nearer to than this part of the way from the right one.
NEAR = 0.25

# T4. A choice may differ while the oracle's margin is under this many derived logit errors: each of the two
# logits may be off by one.
MARGIN_ERRORS = 2.0

# T4. At most this part of a run's decisions may be ties, or this many and YARDSTICK_FACTOR times as many as the rounded
# run is expected to make (`judge.flips`, `decisions.apart`), whichever is more. To first order a choice falls to
# another one with a chance that grows with the error of the logits, so an engine that errs YARDSTICK_FACTOR times as
# much as the yardstick, which T3 grants, ties so much oftener. Independent choices of one that errs as the yardstick
# does pass that bound with a chance of 6e-4 at the worst (Poisson, a mean of 0.66). What is expected hangs on what is
# stored how: of the first 301 decisions of the recorded trace 0.00 in fp32, 1.5 in bf16 (2 were ties), 2.8 with states
# in fp8 by chance (4 were); of the 24 of a drawn one it is 1.0 there. The part alone, a chosen bound, would call 4 of
# these 24 wrong.
TIES_CAP = 0.05
TIES_ALWAYS = 3


# T2, T4, of draws. A score x / temperature, less the largest, is the result of a division and a subtraction, in either
# order, and exp multiplies it by log2(e): three roundings of at most half a unit of the largest score each, and the
# power is good to two units. Twice that, so that whoever computes it in two steps more is no fault.
SCORE_ULPS = 4.0


def sums_error(count: int, eps: float) -> float:
    """What the part of a cumulated sum in its total may be off by, relatively; `count` weights, none negative.

    A sum in two levels has no more than 2 sqrt(count) additions on any way, and each errs by half a unit at most; the
    total errs as much. A sum from left to right errs by chance, and so by less than that, too.
    """
    return 2 * math.sqrt(count) * eps


def log_prob_error(largest: float, vocab: int, eps: float) -> float:
    """What a log-probability, computed from right logits, may be off by; largest: the largest logit, by its size.

    x - max and its power err by SCORE_ULPS of the largest, as scores do. The sum of the powers is relatively off by
    `sums_error`, and so is its logarithm absolutely. The logarithm itself, at most log(vocab), and two more
    subtractions are each good to two units.
    """
    return SCORE_ULPS * eps * (largest + math.log(vocab) + 1) + sums_error(vocab, eps)


def allowed(yardstick: Errors, stored: torch.dtype) -> Errors:
    """What an error may be, given the yardstick's on the same blocks and the dtype in which the subject stores."""
    return YARDSTICK_FACTOR * yardstick + ULPS * torch.finfo(stored).eps
