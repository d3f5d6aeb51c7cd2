"""Base models, heads, KV cache, checkpoints and the registry."""
