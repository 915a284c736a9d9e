"""Device functions that kernels of several kinds share."""
