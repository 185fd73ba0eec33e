"""The form that an output must have, in the three ways in which clients ask for one."""

from collections.abc import Mapping
from typing import Any

from octavo.errors import RequestError, shown
from octavo.server.errors import ApiError, unsupported
from octavo.server.protocol import GenerationRequest
from octavo.structured_output import StructuredOutput

__all__ = ["structured_output"]

# Keys of `structured_outputs`, as the engine calls them.
FIELDS = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
GUIDED = {"guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


def structured_output(request: GenerationRequest) -> StructuredOutput | None:
    """The form that a request asks for.

    Raises:
        ApiError: it is malformed, or there are several.

    """
    if request.guided_whitespace_pattern is not None:
        raise unsupported("guided_whitespace_pattern", "is not served: white space in JSON is up to 32 characters")
    wishes: list[tuple[str, dict[str, Any]]] = []
    if (form := _of_response_format(request.response_format)) is not None:
        wishes.append(("response_format", form))
    if request.structured_outputs:
        given = {FIELDS[k]: v for k, v in request.structured_outputs.items() if k in FIELDS and v not in (None, False)}
        if not given:
            raise ApiError(400, f"structured_outputs has none of {', '.join(FIELDS)}", "structured_outputs")
        wishes.append(("structured_outputs", given))
    for name, field in GUIDED.items():
        if (value := getattr(request, name)) is not None:
            wishes.append((name, {field: value}))
    if len(wishes) > 1:
        names = " and ".join(name for name, _ in wishes)
        raise ApiError(400, f"{names} are given; an output has one form", wishes[1][0])
    for name, form in wishes:
        try:
            return StructuredOutput(**form)
        except RequestError as error:
            raise ApiError(400, f"{name}: {error}", name) from error
    return None


def _of_response_format(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    kind = None if given is None else given.get("type")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        wrapper = given.get("json_schema")
        schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
        if schema is None:
            raise ApiError(400, "response_format of type json_schema needs json_schema.schema", "response_format")
        return {"json_schema": schema}
    allowed = "text, json_object or json_schema"
    raise ApiError(400, f"response_format.type must be {allowed}, got {shown(kind)}", "response_format")
