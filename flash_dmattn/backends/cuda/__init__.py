"""The CUDA extension for Hopper: its rules, and its binding."""
