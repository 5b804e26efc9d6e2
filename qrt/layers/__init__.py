"""The parts of a decoder layer; each takes StepMeta as an argument and knows nothing of requests."""
