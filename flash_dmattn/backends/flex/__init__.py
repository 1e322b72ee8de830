"""FlexAttention as a backend."""
