"""flash_dmattn inside other libraries, a module for each; none is imported before somebody asks for it."""
