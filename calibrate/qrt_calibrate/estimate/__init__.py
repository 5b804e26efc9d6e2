"""What a calibration will take, before the work: memory, sizes, time and bits."""
