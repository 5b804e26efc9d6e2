"""Execute on a CPU the PTX that Triton and Gluon compile for a GPU; README.md says how.

Every thread has its own registers, and the warps take turns. The copy engine delivers as late as the program
allows, or as early as it can; shared memory starts as NaN. Whatever a GPU would do wrong raises a `Fault`.
"""
