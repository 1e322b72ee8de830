"""Equivalence, speed and memory of every backend and its peers: `python -m benchmarks`; docs/benchmarks.md."""
