"""The parts of a decoder layer; a step comes as StepMeta, and none knows of requests."""
