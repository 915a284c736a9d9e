"""Fuzzing: drawn sequences of legal events through both sides, and the smallest one on which they part.

Leaves out: what is legal (`instep.trace.legal`) and what is compared (`instep.checks`).
"""
