"""HTML pages of results, which work offline: the verdict and tables as text, then charts that can be clicked.

    write_page.py, assets/  the frame of all pages, and their scripts: shared.js, events.js, plots.js
    replay.py             events: `heat_map.py` the heat map, `timeline.py` the timeline

Leaves out: documents and wording (`instep.report`) and the writing of the file (`instep.atomic_write`).
"""
