"""The backends, one module each; `flash_dmattn.selection` holds them in order of preference."""
