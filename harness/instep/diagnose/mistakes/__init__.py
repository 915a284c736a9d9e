"""Known mistakes by family: each tries its own ones on a finding (`Case`), and `explanation_fit.py` decides.

Leaves out: the table of the families (`diagnose/explanation_bank.py`).
"""
