"""Speed, of what was checked: cases, clocks, paired samples, and the gate over them.

Leaves out: any speed of something whose states did not agree with the reference; nothing here reports one.
"""
