"""What the server's own tests share, shared with these too."""

from server.conftest import http, openai, served, tiny_folder

__all__ = ["http", "openai", "served", "tiny_folder"]
