"""Prepared masks: types and builders, packing in PyTorch, faster packers, and the operator that packs a mask.

`flash_dmattn.masks` has the public names. This file has no imports, so that using one module does not load the others.
"""
