"""A checkpoint becomes a spec, weights and a program."""
