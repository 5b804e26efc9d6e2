"""What is asked for: method, grids and settings, and which Linear gets which grid."""
