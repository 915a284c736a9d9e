"""The op sets of `instep.adapters.sglang` and `sglang_commit`, with SGLang from an unpacked wheel.

Leaves out: everything else. With SGLang installed, `--ops instep.adapters.sglang:SIGMOID` does not need this file.
"""

from contextlib import suppress

from instep.adapters.stubbed_imports import sglang

sglang()

from instep.adapters.sglang import *  # noqa: E402, F403
from instep.adapters.sglang_commit import *  # noqa: E402, F403

with suppress(ModuleNotFoundError):  # no ring before 0.5.16
    from instep.adapters.sglang_ring import *  # noqa: F403
