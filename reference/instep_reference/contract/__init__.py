"""What both sides agree on: events, answers, places, configuration, checkpoint. Nothing here computes."""
