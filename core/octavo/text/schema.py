"""JSON that ends: what a form of JSON leaves without bounds gets some.

A model that may go on with digits or white space forever sometimes does.
"""

from typing import Any

__all__ = ["ANY_OBJECT", "WHITE_SPACE", "bounded"]

WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,32}"  # between two parts: a line break and an indent
LARGEST = 2**53 - 1  # to here every reader has integers exactly (RFC 8259, section 6)

# Any object, in Lark's syntax. Strings are as RFC 8259 has them; numbers have as many digits as a double can tell.
ANY_OBJECT = r"""
start: object
object: "{" WS? (pair ("," WS? pair)*)? "}"
pair: STRING WS? ":" WS? value WS?
array: "[" WS? (item ("," WS? item)*)? "]"
item: value WS?
value: object | array | STRING | NUMBER | "true" | "false" | "null"
STRING: /"([^"\\\x00-\x1F\x7F]|\\(["\\\/bfnrt]|u[0-9a-fA-F]{4}))*"/
NUMBER: /-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,3})?/
WS: /WHITE_SPACE/
""".replace("WHITE_SPACE", WHITE_SPACE)

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS = ("items", "additionalProperties", "additionalItems")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")


def bounded(schema: Any) -> Any:
    """The schema with bounds on integers that have none, as a copy. What stands under `not` stays as it is.

    Other numbers are left alone: with bounds the library writes them without exponents.
    """
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for key in _MAPS:
        if isinstance(found.get(key), dict):
            found[key] = {name: bounded(inner) for name, inner in found[key].items()}
    for key in _SCHEMAS:
        if isinstance(found.get(key), dict):
            found[key] = bounded(found[key])
    for key in _LISTS:
        if isinstance(found.get(key), list):
            found[key] = [bounded(inner) for inner in found[key]]
    kinds = found.get("type")
    is_integer = "integer" in kinds and "number" not in kinds if isinstance(kinds, list) else kinds == "integer"
    if is_integer and not {"const", "enum", "multipleOf"} & found.keys():
        _bound(found)
    return found


def _bound(schema: dict[str, Any]) -> None:
    low = [schema[key] for key in ("minimum", "exclusiveMinimum") if key in schema]
    high = [schema[key] for key in ("maximum", "exclusiveMaximum") if key in schema]
    if not low and all(isinstance(value, int | float) and value > -LARGEST for value in high):
        schema["minimum"] = -LARGEST
    if not high and all(isinstance(value, int | float) and value < LARGEST for value in low):
        schema["maximum"] = LARGEST
