"""Whole numbers of a round: tokens that are chosen, drafts that are accepted, trees, places and lengths."""
