"""Portable kernels in Triton: one source for every device that Triton compiles for. No platform of its own."""
