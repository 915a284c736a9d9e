"""Exact streams: labelled tokens run through a model made by hand. So a state shows whose tokens it holds, up to where.

Leaves out: gates. In such a model they are always open, so models with random weights are tested beside it. Contents:
    stamps      a token is a stamp: request, position, and whether the draft was rejected
    checkpoint  a model in which conv windows, states and values hold the stamps of their tokens
    relabel     any trace, with its tokens replaced by stamps
    stream      the check: decodes what memory holds, and reports it
    run         a trace through an engine; only stamps are compared
"""
