"""Chat templates, incremental detokenizing and stop strings: token ids to text and back."""
