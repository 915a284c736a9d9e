"""The gated delta rule over prefill chunks."""
