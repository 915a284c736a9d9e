"""Integer work of a round: chosen tokens, accepted drafts, trees, places and lengths."""
