"""The seam's ops on tokens, counts and addresses: places of rows, acceptance, and moves.

Leaves out: ops that compute numbers, and the op set with all ops (`op_protocols.py`).
"""

from typing import NamedTuple, Protocol

import torch

from instep_reference.contract.place_names import Place

from ..memory_addresses import Address


class RowPlacement(NamedTuple):
    """All int64: positions, locations [N] of packed rows; before, count [B] of requests; last [B]: their last rows."""

    positions: torch.Tensor
    locations: torch.Tensor
    before: torch.Tensor
    count: torch.Tensor  # type: ignore[assignment]  # hides tuple.count, which is not used
    last: torch.Tensor


class RingPlan(NamedTuple):
    """All [B] int64. begin, pending, keep: as in `Ring`.

    settle: the slot to which the state is stored before row 0, or -1. after: the new mark, which is how many tokens the
    stored state contains after the launch.
    """

    begin: torch.Tensor
    pending: torch.Tensor
    keep: torch.Tensor
    settle: torch.Tensor
    after: torch.Tensor


class Acceptance(NamedTuple):
    """All int64. In force: num_correct_drafts, accept_lens, last_correct_step_indices, bonus [B]; accept_index [B, T].

    own_num_correct_drafts, own_bonus [B]: the result of own acceptance, also where another one is forced.
    tokens [B, T]: the tokens of draft extend: for each accepted node the token after it, so the accepted drafts, then
    the bonus, then 0. Example: window r a b c, of which a and b are accepted, bonus x: tokens a b x 0.
    """

    num_correct_drafts: torch.Tensor
    accept_lens: torch.Tensor
    accept_index: torch.Tensor
    last_correct_step_indices: torch.Tensor
    bonus: torch.Tensor
    own_num_correct_drafts: torch.Tensor
    own_bonus: torch.Tensor
    tokens: torch.Tensor


class Accept(Protocol):
    """Acceptance: from the root on, to the child whose token equals the target's own choice at its parent.

    window [B, T] int64: root, then drafts (columns from count on are padding); picks [B, T]: the target's choice at
    each node; count [B]: the window's length (0: idle; every result is 0, and accept_index is -1). parents [B, T]: the
    parent of each node, -1 for the root; None: chains. If several children have the pick, the lowest is taken. Values
    that replace the own result unless they are -1: forced_last [B], the last accepted node, at most count - 1 (in a
    chain: the number of accepted drafts); forced_bonus [B]. caps [B]: the most drafts of a path, own or
    forced, at most count - 1; -1: no limit. A longer path ends there, and its bonus is chosen there. None: no limits.
    """

    def __call__(
        self, *, window: torch.Tensor, picks: torch.Tensor, count: torch.Tensor,
        forced_last: torch.Tensor, forced_bonus: torch.Tensor, parents: torch.Tensor | None = None,
        caps: torch.Tensor | None = None,
    ) -> Acceptance: ...


class TreePlan(NamedTuple):
    """Derived shape of trees, [B, T] int64 each.

    ancestors: bit n of a node is set if node n is on the path from the root to it, itself included; 0 after a window's
    end. depth: of each node, 0 for the root and after the end. inner: the request's slot at nodes that have a child,
    else -1. before: the parent of each node, for a launch of packed rows; -1 for the root and after the end.
    """

    ancestors: torch.Tensor
    depth: torch.Tensor
    inner: torch.Tensor
    before: torch.Tensor


class PlanTree(Protocol):
    """Derive ancestors, depths and parents from the shapes of windows.

    parents [B, T]: of each node, -1 for the root, a lower number than the node's; slots, count [B]: slot -1 or count 0:
    idle, everything is 0 or -1. All int64; T is at most 63.
    """

    def __call__(self, *, parents: torch.Tensor, slots: torch.Tensor, count: torch.Tensor) -> TreePlan: ...


class PathPlan(NamedTuple):
    """Locations [B, T] int64 of accepted nodes, unit * size + entry.

    source: the place of the node; target: the place of the token that it becomes. Both are -1 if nothing has to move.
    """

    source: torch.Tensor
    target: torch.Tensor


class PlanPath(Protocol):
    """Locate the accepted nodes of windows, and the places of their tokens.

    A window begins at position before[b]. Its node accept_index[b, j] becomes the token at position before[b] + j.

    accept_index [B, T], root first, -1 padded; slots, before [B]; all int64; slot -1: idle. On the host: size.
    table  pool view [slots, width] int64: positions are on pages of `size` entries, as in `PlaceRows`
    None   positions are in a ring of `size` entries of the slot, at position % size
    """

    def __call__(
        self, *, accept_index: torch.Tensor, slots: torch.Tensor, before: torch.Tensor, size: int,
        table: torch.Tensor | None = None,
    ) -> PathPlan: ...


class MoveRows(Protocol):
    """Copy entries within pool [units, entries, ...], bit by bit, in rising order of j; -1 skips.

    The entry at source[b, j] goes to target[b, j] (unit * entries + entry). Requests share no entry. Node numbers on a
    path rise, so an entry is read before another entry of the path is written over it.
    """

    def __call__(self, *, pool: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None: ...


class TopkTokens(NamedTuple):
    """[M, k] each: the most probable tokens of rows of logits, int64, and their log-probabilities, at least fp32."""

    tokens: torch.Tensor
    log_probs: torch.Tensor


class MakeTopkTokens(Protocol):
    """Find in logits [M, vocab] the k = `topk` tokens with the largest logits, and log_softmax there.

    The largest comes first, and the lower token on a tie. topk on the host, at most vocab.
    """

    def __call__(self, *, logits: torch.Tensor, topk: int) -> TopkTokens: ...


class Beams(NamedTuple):
    """A growing tree (`contract/grown_draft_tree.py`): its M = k + (num_steps - 1) * k * k candidates, [B, M] each.

    tokens, parents int64 (a parent is a candidate's number; -1: the root);  scores as log-probabilities are
    Candidates of later steps hold 0, -1 and -inf. The other fields describe the beams, the k best candidates of the
    last step, in their order, [B * k] int64 each. beams: their numbers;  next: their tokens;  depth: the step;  rows:
    the row of the last forward that each continues (of B rows after the root, of B * k rows later);  ancestors: bits of
    the head's rows that each sees, including itself (bit 0: the root's, bit 1 + (i - 1) * k + b: that of beam b of step
    i)
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor
    beams: torch.Tensor
    next: torch.Tensor
    depth: torch.Tensor
    rows: torch.Tensor
    ancestors: torch.Tensor


class SelectBeams(Protocol):
    """Add the candidates of step `step`, from 1, to the tree, and make the best of them its beams; new tensors.

    tokens, log_probs  `TopkTokens` of the last forward: [B, k] after the root, [B * k, k] later
    before             the tree after the previous step; None: step 1
    On the host: step, num_steps (1 + (num_steps - 1) * k is at most 63).
    score = the score of the parent + log_prob; with equal scores the lower number is the better one.
    """

    def __call__(
        self, *, tokens: torch.Tensor, log_probs: torch.Tensor, before: Beams | None, step: int, num_steps: int
    ) -> Beams: ...


class GrownTree(NamedTuple):
    """Windows of `nodes` nodes, int64.

    tokens [B, nodes - 1]: of the drafts, 0 after the last; parents [B, nodes]: -1 for the root and after the last.
    """

    tokens: torch.Tensor
    parents: torch.Tensor


class BuildTree(Protocol):
    """Build the window of the best nodes - 1 candidates, or of all if there are fewer, in rising order of candidates.

    tokens, parents, scores [B, M]: of `Beams` after the last step. On the host: nodes.
    """

    def __call__(
        self, *, tokens: torch.Tensor, parents: torch.Tensor, scores: torch.Tensor, nodes: int
    ) -> GrownTree: ...


class Draw(Protocol):
    """Choose the token after every row: drawn as `contract/sampling.py` defines; with temperature 0 as `pick` chooses.

    logits [M, vocab]; row begin[b] + t, t < count[b], is node t of request b. -> [M] int64; 0 for a row of no request.
    window [B, T] int64: each node's token; parents [B, T] int64, parents[:, 0] = -1; None: chains
    begin, count [B] int64; sampling [B, 3] fp32: temperature, top_k (0: all), top_p (1: all)
    uniforms [B, T], final [B] int64: in units of UNIFORM
    """

    def __call__(
        self, *, logits: torch.Tensor, window: torch.Tensor, parents: torch.Tensor | None, begin: torch.Tensor,
        count: torch.Tensor, sampling: torch.Tensor, uniforms: torch.Tensor, final: torch.Tensor, to: Place,
    ) -> torch.Tensor: ...


class PlaceRows(Protocol):
    """Place packed rows: row begin[b] + t, t < count[b], is position length[slots[b]] + shift + t of request b.

    slots, begin, count [B] int64 (slot -1: idle); rows = N and shift: on the host; length: pool view [slots] int64;
    table: pool view [slots, width] int64, page ids in order, -1 padded.
    locations: page * page_size + offset; -1 where the table has -1 or ends. A row that no request covers: position 0,
    location -1. before = length + shift; idle: before and count 0. last = begin + count - 1, or -1 without rows.

    depth [N] int64, for nodes of trees: a row still has location length + shift + t (a place per node), but its
    position is length - lead + depth, and before = length - lead, the position of node 0. On the host: lead, 0 for the
    target and 1 for the draft head, whose row of a token is one place earlier. None: chains.
    """

    def __call__(
        self, *, slots: torch.Tensor, begin: torch.Tensor, count: torch.Tensor, rows: int,
        length: torch.Tensor, table: torch.Tensor, page_size: int, shift: int,
        depth: torch.Tensor | None = None, lead: int = 0,
    ) -> RowPlacement: ...


class Choose(Protocol):
    """own, forced [B] or [B, T] int64 -> forced where it is not negative, else own."""

    def __call__(self, *, own: torch.Tensor, forced: torch.Tensor) -> torch.Tensor: ...


class Advance(Protocol):
    """length: pool view [slots] int64; slots, by [B] int64: length[slots[b]] += by[b]; a slot of -1 skips."""

    def __call__(self, *, length: torch.Tensor, slots: torch.Tensor, by: torch.Tensor) -> None: ...


class Shift(Protocol):
    """Shift each request's packed tokens by one: row begin[b] + t takes token begin[b] + t + 1, the last row behind[b].

    tokens [N], begin, count, behind [B], all int64 -> [N]; t < count[b]. A row that no request covers gives 0.
    Example: tokens 5 6 7 of one request, with the next token 9 -> 6 7 9.
    """

    def __call__(
        self, *, tokens: torch.Tensor, begin: torch.Tensor, count: torch.Tensor, behind: torch.Tensor
    ) -> torch.Tensor: ...


class PlanRing(Protocol):
    """Plan a ring: kept tokens that a request runs again, entries for its rows, and the tokens that its state then has.

    slots, before, count [B] int64 (slot -1: idle: pending 0, keep and settle -1, begin and after 0); settled: pool view
    [slots] int64, how many tokens the state contains. On the host: size, entries of a ring; most, the largest count.
    pending = before - settled, clamped to 0 .. size - most; begin = (before - pending) % size.

    spare  None (decode, prefill, a fold): the rows go into the state. keep and settle are -1, after = before + count.
           A number (verify): the rows are kept, keep = before % size. With more than `spare` pending tokens the state
           after them is stored: settle = slot, after = before. Else settle = -1, after = before - pending.
    """

    def __call__(
        self, *, slots: torch.Tensor, before: torch.Tensor, count: torch.Tensor, settled: torch.Tensor,
        size: int, most: int, spare: int | None,
    ) -> RingPlan: ...


class Move(Protocol):
    """Copy units of memory bit by bit, one per request, from source to target; -1 on either side skips the request."""

    def __call__(self, *, source: Address, target: Address) -> None: ...


class Moved(NamedTuple):
    """The arguments of one `move`."""

    source: Address
    target: Address


class Moves(Protocol):
    """`move` for each pair. No pair writes memory that another pair reads."""

    def __call__(self, *, pairs: tuple[Moved, ...]) -> None: ...
