"""The model as calibration runs it: one layer at a time, on one device or several."""
