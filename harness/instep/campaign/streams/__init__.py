"""Exact streams: labelled tokens in a hand-made model, so that a state shows which tokens of which request it holds.

Leaves out: gates, which are always open in such a model; models with random weights are tested as well. Contents:
    stamps      a token is a stamp: request, position, and whether the draft was rejected
    checkpoint  a model in which conv windows, states and values hold the stamps of their tokens
    relabel     any trace, with its tokens replaced by stamps
    stream      the check: decodes memory and reports its contents
    run         a trace through an engine; only stamps are compared
"""
