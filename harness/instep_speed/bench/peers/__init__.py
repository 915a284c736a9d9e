"""The kernels of other packages, one file for each package.

Leaves out: their table (`bench/kernels_of_peers.py`).
"""
