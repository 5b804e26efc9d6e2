"""The steps of a calibration: gradients, layers, training and evaluation."""
