"""Results as HTML pages that need no network: the verdict and tables as text, then charts that answer a click.

    document.py, assets/  the frame that all pages share, and their scripts: shared.js, events.js, plots.js
    replay.py             events: `cells.py` the heat map, `lanes.py` the timeline, `maps.py` tensors of a finding
    family.py             results of other commands, each told in a file of its own; `parts.py` has what they share

Leaves out: the words (`instep.report`), which pages have from there, and writing the file (`instep.atomic_write`).
"""
