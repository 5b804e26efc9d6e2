"""What evaluators read: texts, prompts, the lengths of requests, the sizes of models, and checkpoints."""
