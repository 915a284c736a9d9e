"""A recording of an engine that has a scheduler of its own, judged afterwards: what it said, accepted and showed.

`write.py` is the only file that an engine needs. Leaves out: engines that can be led event by event (`instep replay`).
"""
