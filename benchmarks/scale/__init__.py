"""Context-parallel attention on the GPUs of one host: bandwidths, times beside one GPU, and torch's own beside them."""
