"""The CPU engine: linear layers, norms and attention as machine code."""
