"""How an outcome is told: on the terminal, and as data.

Leaves out: judging it (`instep.verdict`).
"""
