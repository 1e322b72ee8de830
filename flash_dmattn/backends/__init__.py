"""The backends, one module each; `flash_dmattn.dispatch.selection` holds them in order of preference."""
