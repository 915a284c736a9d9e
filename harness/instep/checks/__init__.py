"""Table of contents of the checks: which serve a run that moves labels, and which one of numbers.

Leaves out: relations, which vary a run, and every constant (`tier_allowances.py`).
"""

from ..oracle.oracle import Oracle
from ..oracle.state_oracle import FreeOracle, Redraws
from .accumulated_errors import Propagated
from .aliasing import Aliasing
from .capacity import Capacity
from .check_interface import Check
from .decisions import Decisions
from .declared_writes import Bounds
from .exact_labels import Labels
from .experts import Experts
from .graph_replays import Graphs
from .grown_trees import Grown
from .host_reads import HostReads
from .kept_copies import Copies
from .known_wrong_states import Directed
from .leaks import Leaks
from .one_sided_errors import OneSided
from .op_call_contracts import Contracts
from .ops_on_own_inputs import OwnInputs
from .poison import Poison
from .ranks import Agreement, Collectives, Group, Replicas, Stages
from .recomputed_values import Derived
from .sampled_tokens import Draws
from .trace_bookkeeping import Identity
from .unchanged_bytes import Bytes
from .unserved_events import Played
from .unused_positions import Tails

__all__ = ["Check", "for_free_runs", "for_labels", "for_numbers", "of_ranks", "structure"]


def structure() -> tuple[Check, ...]:
    """The checks of every subject, whether it computes or moves labels."""
    return (Bounds(), Contracts(), Capacity(), Aliasing(), Graphs(), HostReads(), Tails(), Poison(), Leaks(), Copies())


def of_ranks(ranks: int, stages: int = 1, replicas: int = 1) -> tuple[Check, ...]:
    """The checks that compare the ranks, pipeline stages or replicas of a subject; none of one rank."""
    if replicas > 1:
        return Agreement(), Group()
    if stages > 1:
        return Agreement(), Stages()
    return (Agreement(), Collectives(), Replicas()) if ranks > 1 else ()


def for_labels() -> tuple[Check, ...]:
    """The checks of a subject that moves labels (`ledger`), where everything is exact."""
    return (Identity(), Grown(), Labels(), Bytes(), *structure())


def for_numbers(
    oracle: Oracle, repeated_runs: Redraws | None = None, uncalibrated: str | None = None,
) -> tuple[Check, ...]:
    """The checks of a subject that computes. The directed diagnosis of a state comes before its error.

    repeated_runs: further draws of the rounded run; None: none, so that the first draw decides. uncalibrated: why small
    errors to one side are not judged; empty: they are; None: this run has no such check.
    """
    experts, one_sided = Experts(oracle), () if uncalibrated is None else (OneSided(oracle, uncalibrated),)
    arithmetic = Directed(oracle), Derived(oracle), OwnInputs(oracle), *one_sided, Draws(), experts
    free = Propagated(repeated_runs, others=experts.parted), Decisions(experts.parted)
    return (Played(), Identity(), Bytes(oracle), *structure(), *arithmetic, *free, Grown())


def for_free_runs(oracle: FreeOracle, repeated_runs: Redraws | None = None) -> tuple[Check, ...]:
    """The checks of a subject that shows no rows between its layers. repeated_runs: as in `for_numbers`."""
    arithmetic = Directed(oracle), Draws(), Propagated(repeated_runs, oracle.stored), Decisions()
    return (Played(), Identity(), Bytes(oracle), *(structure() if oracle.memory else ()), *arithmetic)
