"""Finding platforms, choosing one, and resolving each op to an implementation."""
