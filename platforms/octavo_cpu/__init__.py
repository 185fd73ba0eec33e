"""The host processor as a platform: native kernels of `csrc_cpu`, and torch where they are not built."""
