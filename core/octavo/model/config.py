"""A model's config.json as a family reads it."""

from collections.abc import Mapping
from typing import Any

from octavo.errors import ModelError

__all__ = ["ConfigView"]


class ConfigView:
    """Keys of a config as attributes, with the defaults and older spellings of its family.

    An absent key has the family's default. A null is a value: it says "none", also where there is a default.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str,
        defaults: Mapping[str, Any] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """Read `values`.

        Args:
            values: the object in the file.
            where: the file, for messages.
            defaults: key to value, for absent keys.
            aliases: key to what this family's files call it.

        """
        self._where = where
        old = {key: values[name] for key, name in (aliases or {}).items() if name in values}
        self._values = {**(defaults or {}), **old, **values}

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or `default` where it is absent or null."""
        value = self._values.get(key)
        return default if value is None else value

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def __getattr__(self, key: str) -> Any:
        """The value of a key that the family cannot do without.

        Raises:
            ModelError: absent, or null.

        """
        if key.startswith("_"):
            raise AttributeError(key)
        value = self._values.get(key)
        if value is None:
            kind = self._values.get("model_type")
            raise ModelError(f"{self._where} lacks {key!r}, which a model of type {kind!r} needs")
        return value
