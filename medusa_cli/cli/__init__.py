"""Typer commands, options and rendering. No tensor arithmetic."""
