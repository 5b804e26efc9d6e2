"""What a calibration says at its end, on the screen and in files."""
