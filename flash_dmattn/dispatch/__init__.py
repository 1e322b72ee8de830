"""Which backend runs a call: the registry, settings, the choice, refusals, the cache of calls, packers of masks.

Also who writes to caches of keys and values. This file imports nothing: `state` has to load without torch.
"""
