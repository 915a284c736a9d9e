"""The kernels of other packages, one file for each package.

Leaves out: their table (`bench/peer_table.py`).
"""
