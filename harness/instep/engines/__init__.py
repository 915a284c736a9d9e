"""Door 3: an engine that nobody here wrote, led event by event by a few verbs.

Leaves out: an op set and a whole engine of the contract (`instep.adapters`).
"""
