"""A step on the device: from a plan to tensors, through the model, to the tokens that it samples."""
