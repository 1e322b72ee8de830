"""Which backend runs a call: settings, the registry, the choice and its plan; who packs masks and writes to caches.

This file imports nothing: `config` has to load without torch.
"""
