"""The tree that a drafter grows by itself: its tokens, parents and order. This file computes nothing.

    step 1   the candidates are the `topk` most probable tokens after the root
    step i   the beams are the `topk` candidates of step i - 1 with the highest scores, the highest first. The head runs
             on each of them, with the row y of its parent; its `topk` most probable tokens are the candidates of step i
    ..       up to step `num_steps`, so no path is longer
    window   the root, then the `num_draft_tokens` - 1 candidates with the highest scores

score of a candidate   the sum of the log-probabilities along its path; a log-probability is log_softmax of the draft
         logits over the whole vocabulary, in fp32. So is the sum, from the root on: score(parent) + log-probability
order    candidates are numbered as they come: step by step, then by the rank of their beam, then by their own
         probability. Equal logits of one row: the lower token first. Equal scores: the lower number first
nodes    the chosen candidates in rising order of their numbers are nodes 1, 2, ... A parent has a lower number than its
         children and no lower score, so it is chosen before them
fewer    if there are fewer candidates than room, all of them are chosen: topk + (num_steps - 1) * topk ** 2 drafts.
         So all requests of a batch have equally many nodes

Places: `chain.0` has the logits after the root, one row per request. `chain.i` has the head's rows on the best
candidates of step i: `topk` per request, in the order of the beams. The row of beam b, from 0, is at place
L + (i - 1) * topk + b of the draft KV (L: the committed length). Its position is L - 1 + i, because its token has depth
i. It sees the committed rows, the rows of its ancestors, and itself.

Mirrors: SGLang (0.5.9 to 0.5.23), `speculative_eagle_topk`: the same candidates, beams, numbers and windows. Differs:
SGLang's score is a product of probabilities, which underflows on long paths; its order of equal scores is not
defined; and in versions that do not copy the KV of the parent's branch, a beam reads the draft KV of the branch with
its own number, whatever its parent is.
"""

MOST_BEAMS = 62  # maximum rows of all steps: with the root they are nodes of a tree, whose ancestors are int64 bits
