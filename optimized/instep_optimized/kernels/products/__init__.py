"""Matrix products: linear layers, the dense MLP, the head, and experts."""
