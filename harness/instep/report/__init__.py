"""Shows an outcome: on the terminal, and as data.

Leaves out: the judgement (`instep.verdict`).
"""
