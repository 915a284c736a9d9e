"""The gated delta rule token by token: decode, verify windows, trees, and tokens that run again."""
