"""A soak: drawn rounds without end, on engines that stay; told in sums, and resumed where they stand.

Leaves out: what is drawn (`instep.fuzz`), how it is served and what is compared (`instep.replay`, `instep.checks`).
"""
