"""Trees, tree attention, drafting, acceptance and the decode loop: token ids, no text."""
