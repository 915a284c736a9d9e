"""Campaigns of many runs: drawn events, endless runs, relations between runs, readable labels, and real sizes.

Leaves out: a single replay (`instep.run`).
"""
