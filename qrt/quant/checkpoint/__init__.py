"""Checkpoints on disk: one reader for plain and quantized Hugging Face folders, one writer.

checkpoint = open_checkpoint(path)            # reader.py: config, tensor names, weights in canonical form
with CheckpointWriter(out, ...) as writer:    # writer.py: compressed-tensors, sharded, byte-deterministic
"""

from qrt.quant.checkpoint.reader import Checkpoint, open_checkpoint
from qrt.quant.checkpoint.writer import CheckpointWriter

__all__ = ["Checkpoint", "CheckpointWriter", "open_checkpoint"]
