"""What an architecture means, in torch alone: the model runs by it, and the calibrator computes by it."""
