"""Exact streams: labelled tokens through a model made by hand, so that a state says whose tokens it holds, up to where.

Leaves out: gates, which such a model has open for ever (random weights run beside it). Contents:
    stamps      a token is a stamp: request, position, and whether the draft was rejected
    checkpoint  a model in which conv windows, states and values hold the stamps of their tokens
    relabel     any trace, said in stamps
    stream      the check: decodes what is held, and says it
    run         a trace through an engine, with nothing to compare but stamps
"""
