"""The calibration text, and the token windows cut from it."""
