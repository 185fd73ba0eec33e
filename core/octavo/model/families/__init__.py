"""Model families: from a config to a `DecoderSpec` and a table of weight names."""
