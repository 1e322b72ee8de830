"""Prepared masks: types and builders, packing in PyTorch, faster packers, and the operator that packs a mask.

`flash_dmattn.masks` has the public names; this package imports nothing, so that using one part does not load the rest.
"""
