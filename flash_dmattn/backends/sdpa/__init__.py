"""Torch's fused kernels as a backend."""
