"""Octavo on OpenCL: blocks of keys and values in device buffers, attention in kernels of its own."""
