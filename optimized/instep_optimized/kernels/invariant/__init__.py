"""Kernels that give a row the same bits whatever the other rows are.

Leaves out: production kernels that have this property already: those with one program per row, and those in which
every element of a result is a separate sum.
"""
