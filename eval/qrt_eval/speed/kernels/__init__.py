"""Time every operator at the sizes of a model, beside its floor and torch's own: `qrt-eval kernels`."""
