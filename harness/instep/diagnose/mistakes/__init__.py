"""Known mistakes by family: each family tries its own ones on a finding (`Case`), and `fit.py` decides which fits.

Leaves out: the table of the families (`diagnose/bank.py`).
"""
