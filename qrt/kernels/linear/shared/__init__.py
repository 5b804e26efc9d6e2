"""Device code that the kernels of products share."""
