"""The tokens of a tree that a recording drafts: looked up in the request's own text, as an n-gram drafter does.

The first child of a node is the token that last followed the same two tokens, the next child the token that followed
them before that. The root's first child is the draft head's proposal, if there is one.
Leaves out: the shape, which the policy gives.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, count

from instep_reference.contract.errors import BadInput

LOOKED_UP = 2  # tokens before the wanted one


def picks(
    text: Sequence[int], parents: Sequence[int], proposal: int | None, vocab: int, chance: random.Random
) -> tuple[int, ...]:
    """A token for every draft; siblings differ. text: all tokens so far, the root last; parents: of every draft.

    Raises BadInput if a node has more children than the vocabulary has tokens.
    """
    node, children = max(Counter(parents).items(), key=lambda item: item[1])
    if children > vocab:
        raise BadInput("trees", found=f"node {node} with {children} children",
                       expected=f"at most {vocab}: a token of the vocabulary for each")
    lines: list[tuple[int, ...]] = [()]
    tokens: list[int] = []
    for number, parent in enumerate(parents):
        taken = {tokens[other] for other in range(number) if parents[other] == parent}
        wished = [] if parent or proposal is None else [proposal]
        wanted = chain(wished, followers((*text, *lines[parent])), (chance.randrange(vocab) for _ in count()))
        tokens.append(next(token for token in wanted if token not in taken))
        lines.append((*lines[parent], tokens[-1]))
    return tuple(tokens)


def followers(text: Sequence[int], looked_up: int = LOOKED_UP) -> Iterator[int]:
    """The tokens that followed earlier occurrences of the text's last tokens, the latest first."""
    last = tuple(text[-looked_up:])
    for end in range(len(text) - 1, looked_up - 1, -1):
        if tuple(text[end - looked_up : end]) == last:
            yield text[end]
