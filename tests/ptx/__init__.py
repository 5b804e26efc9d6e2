"""PTX on the CPU: what Triton and Gluon compile for a GPU, a Hopper one first, executed by its definition.

Triton's interpreter knows neither Gluon nor anything asynchronous, and CI has no GPU. Here every thread of a
grid has registers of its own (a numpy array each, a lane a thread) and warps take turns. The copy engine
delivers as late as the program allows, or as early, and shared memory begins as NaN. A fault is raised where
a GPU would hang or be wrong in silence: an access outside its tensor or not aligned, threads that wait for
ever, more arrivals than an mbarrier counts, shared memory that two warps use in no order, what a kernel
before may still write.

    QRT_TEST_PTX=some pytest tests/kernels            those that CI runs this way too: marked `ptx`
    QRT_TEST_PTX=all pytest tests/kernels/test_x.py   all that need no GPU otherwise
    QRT_TEST_PTX_SM=80                                for that GPU, or 86, instead of Hopper's 90
    QRT_TEST_PTX_SEED=1                               warps take turns and copies arrive at random

text.py reads a kernel, grid.py runs one, races.py knows what is ordered, launch.py puts all that in place of
a launch. control, memory, tensor_cores and arithmetic are the instructions. Not modelled: fences between what
threads, copy engine and tensor cores see, approximate functions (they are exact here), what ptxas makes of
the text, time.

Source: https://docs.nvidia.com/cuda/parallel-thread-execution (5.5 tensors and swizzles, 9.7 instructions).
"""
