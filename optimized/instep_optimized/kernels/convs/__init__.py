"""The causal conv of a GDN layer: prompts and windows."""
