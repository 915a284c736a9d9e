"""A soak: endless drawn rounds on long-lived engines, reported in totals, and resumed from a file.

Leaves out: drawing (`instep.campaign.fuzz`), serving and comparing (`instep.run`, `instep.checks`).
"""
