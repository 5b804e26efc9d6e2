"""One generic decoder driven by arch data, and the loader that fills it from a checkpoint."""
