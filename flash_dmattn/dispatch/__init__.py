"""Which backend runs a call: the registry, settings, the choice, refusals, the cache of calls, and who packs masks."""

from . import packers as packers  # registers the fast packers with flash_dmattn.masks
