"""Which backend runs a call: the registry, settings, the choice, refusals, the cache of calls, packers of masks.

Also who writes to caches of keys and values.
"""

from . import cache_writers as cache_writers  # registers the fast writers with flash_dmattn.sequences
