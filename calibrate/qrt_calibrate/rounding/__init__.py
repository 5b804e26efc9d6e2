"""The arithmetic of rounding: grids, scales, clipping, GPTQ, folds and the moments they need."""
