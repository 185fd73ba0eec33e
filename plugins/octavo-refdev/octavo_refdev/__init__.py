"""A fake accelerator with memory of its own, served by Octavo. `platform` is what to copy, `device` the double."""
