"""Whole numbers between host and device, in both directions, without waiting.

Leaves out: what the numbers mean.
"""
