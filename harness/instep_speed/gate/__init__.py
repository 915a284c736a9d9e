"""The speed of engines that were checked first: cases, clocks, paired samples, and the gate over them.

No speed is reported of an engine whose states did not agree with the reference.
"""
