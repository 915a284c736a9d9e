"""What is right: the model, its draft head and a round of speculation, in plain PyTorch, in the width handed in.

Leaves out: speed. The one alphabet of axes, here and everywhere:

  B   requests                     H   key heads of a GDN layer       K   width of a key head
  T   tokens in a row or window    HV  value heads (HV / H = r)       V   width of a value head
  N   packed rows of an event      C   conv channels, 2HK + HV*V      W   width of the causal conv
  M   rows that are asked for      L   tokens in memory               D   width of a hidden row
  E   experts                      I   inner width of an MLP
"""
