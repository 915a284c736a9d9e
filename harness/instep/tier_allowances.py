"""The constants of the tiers T2, T2d, T3 and T4, each with its derivation. None is tuned per run.

Leaves out: how errors are measured (`checks/error_measurement.py`, `checks/known_wrong_states.py`).
"""

import math
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

Errors = TypeVar("Errors", torch.Tensor, npt.NDArray[np.float64])

# T2, T3. An error may be this many times the error of the yardstick on the same block. The yardstick's draws represent
# the worst order of summation (`oracle/reordered_arithmetic.py`), so a subject's own order errs as much or less. Both
# errors are then normal with at most the same deviation. The norm of a block of 32 numbers scatters by 1/sqrt(2 * 32) =
# 12%, so a factor of 3 is out of reach. If a block depends on one number, 1 in 31 000 exceeds 3 times the largest of 16
# draws.
YARDSTICK_FACTOR = 3.0

# Products that a subject declares to be narrower change the yardstick, never a constant: see
# `oracle/declared_product_rounding.py`.

# T2, T3. Added in units of the last place (`finfo.eps`) of the stored dtype: one rounding of each side into storage and
# one of each side's last operation. If the yardstick happens to be exact, only this term remains.
ULPS = 4.0

# T2, from an op's own inputs: the same two constants for one op. Truth and draws both read the subject's own rows, so
# earlier rounding is in the input of both and in the error of neither. No other op amplifies errors, so 4 draws
# suffice. The numbers of a block share a factor of a norm, a decay or a gate: one or two functions, each within 2 units
# (`oracle/reordered_arithmetic.py`), which ULPS covers. Only a softmax with two nearly equal keys, or a router with two
# nearly equal experts, depends on the error of one score, which grows with the score; there the number of draws stays.
# The read-out of the delta rule (`ROUNDED_ONCE`) has a tighter limit if it is stored in 16 bits. ULPS would grant
# 4 units there, but one rounding needs half a unit. So draws are taken before they are rounded into storage, and the
# found value is moved towards the truth o by at most half a unit. Let y be the subject's value before rounding. Then
#     |round(y) - o| - half a unit  <=  |y - o|        with the unit of storage of the larger of the two numbers
# holds for every number, so the rest of a correct engine's error is at most its error before storage. The limit is
# 3 e_r + 4 ulp in the width of the computation. The read-out keeps the 4 units if the state is stored narrower than
# computed, as some engines store it after every token.
# Other places have this limit only in op sets whose roundings are all known (`CALIBRATED`), and there not the results
# of attention and of an MLP (`ROUNDED_ON_THE_WAY`): a weight of attention and the middle of an MLP are rounded. On a
# GPU only places without a product have it, as tensor cores truncate sums. Engines elsewhere round a norm before they
# multiply it by its weight (vLLM's `rms_norm`), or norm a sum that they round only to store it (FlashInfer's
# `fused_add_rmsnorm`), without a declaration, so these keep the 4 units, unless they declare `once`. Then their stored
# result is enough: with round to nearest, |round(y) - y| is at most half a unit, also of a tie, whichever way it falls,
# and next to a power of two, whose larger unit counts. So round(y) may be any number within half a unit of y, and y
# any number within 3 e_r + 4 ulp of o; together that is the limit above. An op that also rounds on the way, by half a
# unit of a part of y, moves y by up to as much, 2^15 ulp in bf16. A number that moves by d < 1 units is stored as
# another number with the probability d, so a single number may hide it, and a row of them hardly ever does.

# T2 of memory that is stored in tiles with one scale each (`Blocked`; states in fp8). ULPS would grant 4 units of 2^-3,
# half of the number. A state is rounded once, when it is stored, so the rule above applies: the found value is moved
# towards the truth by at most half a unit, and the rest is judged at 3 e_r + 4 ulp of fp32. The unit is that of the
# larger number, in the larger of the two scales: each side takes its scale from its own largest number, and these
# differ by the error before the store. Storage adds a division by the scale and a product with it, each within 1 ulp
# of fp32.

# T1, T2 of the states of tracked prefixes that are kept narrower (`KEPT`, `CHUNK` of the contract). A prefix that
# ends where its request is has the request's own state, rounded once: T1 compares bits. A prefix that ends inside an
# accepted path has a state that no pool holds any more. T1 requires that its numbers are numbers of the storage,
# which a second rounding leaves as they are, and T2 applies the rule above: it moves the found value by at most half
# a unit, and judges the rest at 3 e_r + 4 ulp of the pool's dtype, in which the state was stored before. A hit needs
# no allowance: the request has the bits that the prefix shows, in the dtype of its pool, and later events are
# recomputed from the subject's bits. Only T3 and T4 compare with a truth that is not rounded. Their yardstick, the
# rounded run, rounds at the same points, so its error contains that of int8.

# T2, T2d, T3 of rings whose keys and updates have two parts of 16 bits (`RING` of the contract). No constant changes:
# the yardsticks round where the subject does, and the limit stays 3 e_r + 4 ulp of fp32. Let u be half a unit of the
# dtype of the parts at 1, 2^-8 in bf16 and 2^-11 in fp16. For 2^e <= |x| < 2^(e+1) the high part errs by at most u 2^e.
# This rest has at most 16 significant bits, so fp32 has it exactly. Being at most u 2^e, its nearest number of 8 bits
# (11) errs by at most u/2 u 2^e: 2^-17 |x| in bf16, 2^-23 |x| in fp16, where below 2^-14 a rest errs by at most 2^-25.
# The sum of both parts is a multiple of the unit of x in fp32, and below 2^(e+1), so reading rounds nothing. A token
# that is run again adds k u^T, off by at most (2 * 2^-17 + 2^-34) |k| |u|, to a state that later decays shrink.
# Such errors are some 100 times those of fp32, so without the declaration a split ring is found, and a low part that is
# lost errs 2^8 times as much as one that is rounded. The yardsticks' numbers are nearly those of the subject, so both
# round nearly alike; further draws of T2d and T3 round low parts up or down (`in_two_parts`).

# A block whose largest number is below this limit has lost bits to underflow, so it has no relative error. The limit
# is the smallest normal number of fp32 (and of bf16, which has the same exponents) over the precision of fp32.
SCALE_FLOOR = torch.finfo(torch.float32).tiny / torch.finfo(torch.float32).eps

# Smaller blocks are judged together, as the norm of fewer than 32 numbers is no measurement (see above).
SMALLEST_BLOCK = 32

# T2, errors to one side (`checks/one_sided_errors.py`). b: a correct engine's error has a mean if it is the same at
# every event. An op has at most two constants, which are made once from its parameters: each is rounded to nearest,
# half a unit, or is one function (exp of A_log), which the libraries of CPUs compute within one unit (SLEEF, glibc). A
# function's error over many arguments has a mean far below its bound. Measured means of correct engines that are no
# accident (4 standard errors) are at most 3.4e-8 in fp32, 0.3 units (`plain` on the main trace).
CONSTANT_ULPS = 1.0

# The probability that a correct engine is accused in one group (a head or a channel of a place) of a run, over all
# looks at it. A run of a 9B model has some 3e6 groups, one of our traces 2e4: 3e-5 and 2e-7 false alarms per run.
ONE_SIDED_RISK = 1e-11

# Fewer samples have no finding: the limit of the first look is 7.3, and |sum e| <= sqrt(n) sqrt(sum e^2) always.
FEWEST_SAMPLES = 64

# T3. How often the rounded run is drawn again before an error counts. More draws help only if they differ. Another
# order of summation moves a number by some units of 2^-24. Stored or multiplied in 16 bits, nearly all numbers then
# round as before, and in a model with few channels 8 draws are identical. So every further draw rounds stochastically
# where rounding is declared (`up_or_down`), and two draws share no rounding. The mean square of a stochastic rounding
# is the mean of f (1 - f), 1/6 of a squared unit; to nearest it is 1/12. So such draws err sqrt(2) times as much as a
# correct engine. If all of an error depends on one number (a layer makes every error 10 times larger), the error of a
# correct engine exceeds 3 times the largest of 7 such draws once in 5000; if nothing is rounded below the width, that
# of 8 equal draws once in 1100; that of one draw once in 5. Measurement in a random model of 4 layers in bf16, rounded
# as by our kernels, at its third event, for 150 engines that err as these draws do: 8 draws to nearest call 68 wrong,
# these draws none. A draw that is 3 * 100 times too small is no bad luck (1 in 500 at the worst), so such an error is
# called wrong at once.
REDRAWS, LUCK = 7, 100.0

# T3. The truth's own error: fp64 in another order of summation agrees within this (the reference's properties).
TRUTH_ERROR = 1e-12

# T2d. Columns of V that are judged together: the narrowest tile in which kernels write a state. The V columns of a
# state evolve independently, so a stale tile is a wrong state in its columns and a right one in the others.
COLUMNS = 8

# T2d. The projection of the error on (wrong - right) is 0 for a right state and 1 for a wrong one; the limit is half
# way. The projections of correct engines are measured (`fixtures/results/calibration.json`).
PROJECTION_LIMIT = 0.5

# T2d. The largest standard error at which a projection decides; the limit is then 8 standard errors from 0.
# A correct engine's projection is a sum of many roundings, each times its effect along that direction. In a draw with
# stochastic rounding (`up_or_down`) each of them deviates at least as much as rounding to nearest does. So by
# Hoeffding's bound (both signs are equally likely) a correct projection exceeds t deviations of such draws with a
# probability under exp(-t^2 / 2), which is 1e-14 for t = 8. The deviation is measured from 128 draws before anything is
# called wrong. In the worst case the deviation of a pair of block and wrong state is too large to decide but is
# measured as small enough; the probability is then 7.5e-13 (with only 16 draws 4e-7). A long run of a 9B model judges
# some 4e7 pairs, of which 1 in 100 is that close to the limit (measured): 3e-7 false alarms per run.
PROJECTION_ERROR = 1 / 16

# T2d, of a free run (`oracle/state_oracle.py`). The first look has one draw, because each draw is a whole run. So a
# pair whose deviation is too large to decide is decided all the same if this draw errs little along its direction:
# with a deviation s that is the part 1/(16 s) * sqrt(2 / pi) of pairs, a fifth for s = 1/4. The projections of these
# pairs are spread over the whole range up to the limit, and those beyond it are measured again, with 16 or 128 draws,
# and dropped. So the largest projection of a long correct run is close to the limit whatever the engine's error is:
# "allowance used" is not a distance from an accusation here. In 11 events of a recorded SGLang 0.5.13 with its rounding
# declared, 18 pairs had a projection above 0.15, the largest 0.34; 16 draws showed deviations of 0.12 to 0.23 for all
# of them (2.0 deviations at most), so none could have been called wrong. Without the declaration of that conv's results
# there were 62 such pairs, the largest 0.49 (3.6 deviations at most): no draw had these roundings.

# T2d. If operands of products may be truncated (tf32; `oracle/declared_product_rounding.py`), errors of correct engines
# have a mean, which truncating yardsticks show. A wrong state is decided only while the limit is 8 standard errors
# beyond this many times the mean: once for a kernel that truncates like the yardstick, twice for a formula with other
# operands.
LEANING = 2.0

# T2d. Correct states that are drawn to measure that error if yardsticks share roundings, and before anything is wrong.
# The first look at other states has the first 4 draws of T2. Their deviation scatters: one pair in 11 whose deviation
# is twice the limit is decided by them, and one in 1000 by 16 draws. Its projection exceeds 1/2, 4 deviations, once in
# 16 000, and the 128 draws then drop it. So the number of the first draws changes no verdict, only the count of
# undecided pairs (777 instead of 775 of 343 000 in the main trace).
DITHERED, MORE_DRAWS = 16, 128

# T2d. At most this part of an event's pairs of block and wrong state may be undecidable; above it too little was
# compared. A state stored in bf16 cannot distinguish a decay of 0.9999 from 1 (three of the known wrong states:
# dropped, doubled, stale gate). The bound is chosen; the part that correct engines leave undecided is measured, too.
UNDECIDED_CAP = 0.5

# T2, T2d. A tensor is recognised as a wrong one if its distance from it is below this part of the distance between
# the wrong and the right one.
NEAR = 0.25

# T4. A choice may differ while the oracle's margin is under this many derived logit errors, one for each of the two
# logits.
MARGIN_ERRORS = 2.0

# T4. Ties of a run may be at most this part of its decisions, or this number plus YARDSTICK_FACTOR times the expected
# ties of the rounded run (`judge.flips`, `decisions.apart`), whichever is more. To first order the probability that a
# choice changes grows with the error of the logits, so an engine that errs YARDSTICK_FACTOR times as much as the
# yardstick, which T3 grants, ties that much more often. Independent choices of an engine that errs like the yardstick
# exceed the bound with a probability of at most 6e-4 (Poisson, a mean of 0.66). The expectation depends on the storage:
# for the first 301 decisions of the recorded trace it is 0.00 in fp32, 1.5 in bf16 (2 were ties), 2.8 with stochastic
# fp8 states (4 were); for the 24 decisions of a drawn trace it is 1.0 there. The part alone, which is chosen, would
# call 4 of these 24 wrong.
TIES_CAP = 0.05
TIES_ALWAYS = 3


# T2, T4, of draws. A score x / temperature minus the largest score takes a division and a subtraction, in either
# order, and exp multiplies it by log2(e): three roundings of at most half a unit of the largest score each, and the
# power is good to two units. The constant is twice that sum, to allow for two more steps.
SCORE_ULPS = 4.0


def one_sided_limit(look: int) -> float:
    """t of the look with this number, from 1: 2 exp(-t^2 / 2) is its part 1 / (look (look + 1)) of the risk."""
    return math.sqrt(2 * math.log(2 * look * (look + 1) / ONE_SIDED_RISK))


def sums_error(count: int, eps: float) -> float:
    """The relative error of a cumulative sum as a part of its total, for `count` weights of which none is negative.

    A sum in two levels has at most 2 sqrt(count) additions on every path, each with an error of at most half a unit;
    the total errs as much. Errors of a sum from left to right are random, and so also smaller than that.
    """
    return 2 * math.sqrt(count) * eps


def log_prob_error(largest: float, vocab: int, eps: float) -> float:
    """The allowed error of a log-probability that is computed from right logits. largest: the largest absolute logit.

    x - max and its power err by SCORE_ULPS of the largest, as scores do. The sum of the powers has a relative error of
    `sums_error`, and its logarithm the same absolute error. The logarithm itself, at most log(vocab), and two more
    subtractions are each good to two units.
    """
    return SCORE_ULPS * eps * (largest + math.log(vocab) + 1) + sums_error(vocab, eps)


def allowed(yardstick: Errors, stored: torch.dtype) -> Errors:
    """The allowed error, from the yardstick's error on the same blocks and the subject's storage dtype."""
    return YARDSTICK_FACTOR * yardstick + ULPS * torch.finfo(stored).eps


def granted(largest: torch.Tensor, noise: torch.Tensor, stored: torch.dtype, factor: float = 1.0) -> torch.Tensor:
    """The margin of the truth up to which a choice may differ. largest: the truth's largest absolute logit."""
    return MARGIN_ERRORS * factor * largest * allowed(noise, stored)
