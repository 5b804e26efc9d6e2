"""What comes behind the engine: its outputs become texts, vectors and scores."""
