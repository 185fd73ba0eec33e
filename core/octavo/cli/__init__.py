"""The `octavo` command, one file a sub-command."""
