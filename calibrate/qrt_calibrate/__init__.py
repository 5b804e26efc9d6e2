"""The offline calibrator: a Hugging Face checkpoint in, a quantized one out, in one layer's memory."""
