"""The Triton kernels as a backend."""
