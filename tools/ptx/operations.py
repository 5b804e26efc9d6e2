"""What each instruction does that is no arithmetic, by its name."""

from ptx import control, memory, tensor_cores

OPERATIONS = control.OPERATIONS | memory.OPERATIONS | tensor_cores.OPERATIONS
