"""A result as one HTML page that needs no network: the verdict as text, and two charts on one axis of events.

Leaves out: the words (`instep.report`), which the page has from there, and writing the file (`instep.atomic_write`).
"""
