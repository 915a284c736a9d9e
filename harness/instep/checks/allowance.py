"""Every constant of the tiers T2, T2d, T3 and T4, each with its derivation; nothing here is tuned per run.

Leaves out: how errors are measured (`measure.py`, `directed.py`).
"""

from __future__ import annotations

import torch

# T2, T3. An error may be this many times the error that the yardstick makes on the same block. The yardstick's draws
# stand for the worst order of summation (`observe/reorder.py`), a subject's own order errs as much or less. So both
# errors are normal with at most the same deviation: the norm of a block of 32 numbers scatters by 1/sqrt(2 * 32) = 12%,
# 3 is out of reach. Where a block hangs on one number, the largest of 16 draws is exceeded 3 times by 1 in 31 000.
YARDSTICK_FACTOR = 3.0

# T2, T3. Added in units of the last place (`finfo.eps`) of the stored dtype: one rounding of either side into
# storage, one of each side's last operation; where the yardstick happens to be exact, this alone remains.
ULPS = 4.0

# Blocks whose largest number is below this have lost bits to underflow and have no relative error:
# the smallest normal number of fp32 (and of bf16, which has the same exponents) over the precision of fp32.
SCALE_FLOOR = torch.finfo(torch.float32).tiny / torch.finfo(torch.float32).eps

# Blocks smaller than this are judged together: the norm of fewer than 32 draws is no measurement (see above).
SMALLEST_BLOCK = 32

# T3. How often the rounded run is drawn again before an error counts: of 8 draws the largest is exceeded 3 times by one
# honest error in 1100, even where all of it hangs on one number; of one draw by one in 5.
# A draw that is 3 * 100 times too small is no luck (1 in 500, at the worst): such an error is called wrong at once.
REDRAWS, LUCK = 7, 100.0

# T3. The truth's own error: fp64 agrees with itself in another order within this (the reference's properties).
TRUTH_ERROR = 1e-12

# T2d. Columns of V that are judged together: the narrowest tile in which kernels write a state. V columns of a
# state evolve independently, so one stale tile is a wrong state within its columns and a right one elsewhere.
COLUMNS = 8

# T2d. The projection of the error on (wrong - right): 0 is right, 1 is wrong, and half way decides.
# Honest maxima seen so far: 0.04 (fp32) and 0.15 (bf16 activations) over 8640 blocks each of the recorded trace, 0.29
# with a bf16 state on a small random model; whole wrong states 1.00. Not yet calibrated over many honest variants.
PROJECTION_LIMIT = 0.5

# T2d. The largest standard error of a projection at which it decides: an honest block then stands 0.5 / 0.15 = 3.3
# deviations from the limit; a larger one is undecidable, and counted.
PROJECTION_ERROR = 0.15

# T2d. At most this part of a block's wrong states may be undecidable: above it the check has not looked. A state
# stored in bf16 cannot tell a decay of 0.9999 from 1 (three of the bank's states: dropped, doubled, stale gate).
# A chosen bound: the largest part seen in an event is 0.06 (fp32), 0.10 (bf16), 0.12 (bf16 state, small model).
UNDECIDED_CAP = 0.5

# T2, T2d. A tensor is named after a wrong one that it stands nearer to than this part of the way from the right one.
NEAR = 0.25

# T4. A choice may differ while the oracle's margin is under this many derived logit errors: each of the two
# logits may be off by one.
MARGIN_ERRORS = 2.0

# T4. At most this part of a run's decisions may be ties, but always this many. A chosen bound, not a measured rate: of
# the 505 decisions of the recorded trace none was a tie in fp32, and 2 in bf16.
TIES_CAP = 0.05
TIES_ALWAYS = 3


def allowed(yardstick: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    """What an error may be, given the yardstick's on the same blocks and the dtype in which the subject stores."""
    return YARDSTICK_FACTOR * yardstick + ULPS * torch.finfo(stored).eps
