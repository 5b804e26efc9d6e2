"""One calibration as planned: the checkpoint, what becomes of each Linear, and their checks."""
