"""Wrong states of trees: the commit takes another node, or treats the tree as a chain.

Leaves out: the comparison (`known_wrong_states.py`), and mistakes that are possible with chains, too
(`wrong_state_bank.py`).
"""

from collections.abc import Iterator, Sequence

from instep_reference import gdn

from ..finding_problem import NamedMistake, WrongContent
from ..oracle.recomputation import fold, rule_inputs
from ..oracle.states_with_folded_tokens import Folding
from ..trace.tree_shape import lines
from .wrong_state_inputs import Wrong

NODE = NamedMistake("another-node", "holds the {} after node {}, {}; node {} is the last accepted one")
CHAIN = NamedMistake("tree-as-chain", "takes the tree for a chain: holds rows 0 to {} in their order, {}")


def branches(folding: Folding, path: Sequence[int]) -> list[Wrong]:
    """The states after every node off the path, and after rows in order. path: accepted nodes, root first.

    The state after an earlier node of the path is the state of a smaller count of tokens (`wrong_state_bank.py`).
    """
    assert folding.parents is not None, "asked of trees alone"
    found = [Wrong(known, fold(folding.tokens, folding.base, nodes)[0]) for known, nodes in
             beside("state", folding.parents, path)]  # fmt: skip
    # An engine that keeps updates replays rows with updates that were computed from the states of their parents.
    _, k, _, log_decay, _, _ = rule_inputs(folding.tokens)
    updates, base = folding.tokens.of("update")[None], folding.base.to(k)[None]
    for known, nodes in _as_chains(path, len(folding.parents)):
        rows = list(nodes)
        found.append(Wrong(known, gdn.absorb(k[:, rows], log_decay[:, rows], updates[:, rows], base)[0]))
    return found


def beside(what: str, parents: Sequence[int], path: Sequence[int]) -> Iterator[tuple[WrongContent, Sequence[int]]]:
    """Mistakes that take another path, and its nodes. what: the name of the memory."""
    last = path[-1]
    for node, line in enumerate(lines(parents)):
        if node not in path:
            yield NODE.known(what, node, kin(parents, path, node), last), line
    yield from _as_chains(path, len(parents))


def kin(parents: Sequence[int], path: Sequence[int], node: int) -> str:
    """The relation of a node to the path; the closest one if there are several."""
    last = path[-1]
    if parents[node] == last:
        return f"a child of node {last}"
    if parents[node] == parents[last]:
        return f"a sibling of node {last}"
    if node == len(path) - 1:
        return "whose number is the depth of the path"
    return "the last node of the window" if node == len(parents) - 1 else "a node off the path"


def _as_chains(path: Sequence[int], width: int) -> Iterator[tuple[WrongContent, Sequence[int]]]:
    """The rows that a commit takes if it ignores parents."""
    means = {width: "all of them", path[-1] + 1: "up to the last accepted node", len(path): "as many as are accepted"}
    for rows, said in means.items():
        if list(path) != list(range(rows)):
            yield CHAIN.known(rows - 1, said), range(rows)
