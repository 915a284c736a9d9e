"""What must be settled before any test module is imported.

Leaves out: fixtures; those stand beside the tests that use them.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: a second thread costs more than it brings

import instep_optimized.kernels  # noqa: F401  decides how Triton runs, before transformers imports it natively
