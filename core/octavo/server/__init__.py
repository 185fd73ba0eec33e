"""The HTTP server: OpenAI's protocol over an `AsyncEngine`."""
