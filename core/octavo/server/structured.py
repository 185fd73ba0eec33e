"""The form that an output must have, in the three ways in which clients ask for one."""

from collections.abc import Mapping
from typing import Any

from octavo.errors import RequestError, shown
from octavo.server.errors import ApiError, check_one_of, unsupported
from octavo.server.protocol import GenerationRequest
from octavo.structured_output import StructuredOutput

__all__ = ["form_names", "structured_output"]

# Keys of `structured_outputs`, as the engine calls them.
FIELDS = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
GUIDED = {"guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
REFUSED = ("whitespace_pattern", "structural_tag")  # other keys that are known
BACKENDS = ("auto", "guidance", "lm-format-enforcer", "outlines", "xgrammar")  # all mean the one that is here
NO_NAMES: Mapping[str, str] = {}


def structured_output(request: GenerationRequest) -> StructuredOutput | None:
    """The form that a request asks for.

    Raises:
        ApiError: it is malformed, or there are several.

    """
    if request.guided_whitespace_pattern is not None:
        raise unsupported("guided_whitespace_pattern", "is not served: white space in JSON is up to 32 characters")
    if request.guided_decoding_backend is not None:  # what stands after a colon is for one of them
        name = request.guided_decoding_backend.partition(":")[0]
        check_one_of("guided_decoding_backend", name, BACKENDS, "guided_decoding_backend")
    fields = _fields(request)
    if len(fields) > 1:
        raise ApiError(400, f"{' and '.join(fields)} are given; an output has one form", fields[1])
    for name in fields:
        form = _form(request, name)
        try:
            return StructuredOutput(**form)
        except RequestError as error:
            raise ApiError(400, f"{name}: {error}", name) from error
    return None


def form_names(request: GenerationRequest, names: Mapping[str, str] = NO_NAMES) -> dict[str, str]:
    """How errors that a form meets later, when it is compiled, are to call the field that it came from.

    `names` are of fields that the protocol calls otherwise.
    """
    return {form: names.get(name, name) for name in _fields(request) for form in FIELDS.values()}


def _fields(request: GenerationRequest) -> list[str]:
    """Which fields ask for a form."""
    form = request.response_format
    given = ["response_format"] if form is not None and form.get("type") != "text" else []
    given += ["structured_outputs"] if request.structured_outputs else []
    return given + [name for name in GUIDED if getattr(request, name) is not None]


def _form(request: GenerationRequest, name: str) -> dict[str, Any]:
    value = getattr(request, name)
    if name == "response_format":
        return _of_response_format(value)
    if name in GUIDED:
        return {GUIDED[name]: value}
    for key in REFUSED:
        if value.get(key) is not None:
            raise unsupported("structured_outputs", f"with {key} is not served")
    given = {FIELDS[key]: each for key, each in value.items() if key in FIELDS and each not in (None, False)}
    if not given:
        raise ApiError(400, f"structured_outputs has none of {', '.join(FIELDS)}", "structured_outputs")
    return given


def _of_response_format(given: Mapping[str, Any]) -> dict[str, Any]:
    kind = given.get("type")
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
