"""Who runs in a step, and with which blocks."""
