"""The backends, a module or a folder each; `flash_dmattn.dispatch.registry` has them in order of preference."""
