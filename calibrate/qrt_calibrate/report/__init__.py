"""The report of a calibration, on the screen and in files."""
