"""Which backend runs a call: the registry, settings, the choice, refusals, the cache of calls, and who packs masks."""
