"""Device code in Triton, for CUDA and, interpreted, for tests on any machine.

Nothing here is imported before a kernel runs: the modules need Triton, and `kconvert list-kernels` has to work without.
Each has the jitted functions, a launcher that takes and gives tensors, and an `autograd.Function` where it has a backward.
None knows of modules or layouts: these are in `kernels/ops`.
"""
