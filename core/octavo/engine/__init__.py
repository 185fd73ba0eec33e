"""Requests in, tokens out: the loop and its offline front."""
