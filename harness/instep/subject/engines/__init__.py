"""Door 3: an external engine that the harness drives event by event through a few callbacks.

Leaves out: op sets, and complete engines of the contract (`instep.adapters`).
"""
