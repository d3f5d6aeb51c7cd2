"""Making and measuring heads."""
