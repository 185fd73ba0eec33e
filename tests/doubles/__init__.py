"""Test doubles: small real implementations that make a fault of the engine visible."""
