"""Which grammar a request forces on the engine; tokens sampled under one are never trained.

The forms are those in which vLLM's own server forces tools, so that its parsers read the result: a
named tool gives its arguments alone, "required" gives an array of {"name", "parameters"}.
"""

from typing import Any

from molt.agents.types import ChatRequest
from molt.schemas.errors import RequestRefused

ANY_OBJECT: dict[str, Any] = {"type": "object", "properties": {}}


def grammar_of(request: ChatRequest) -> dict[str, Any] | None:
    """Arguments of vLLM's StructuredOutputsParams; None if the policy may say what it likes.

    Raises RequestRefused for a tool that was not offered and for a form that is not known.

    >>> from molt.agents.types import ChatRequest
    >>> grammar_of(ChatRequest(messages=[], response_format={"type": "json_object"}))
    {'json_object': True}
    """
    choice = request.tool_choice
    if choice == "required" and request.tools:
        return {"json": _calls(request)}
    if isinstance(choice, dict):
        name = choice.get("function", {}).get("name")
        for tool in request.tools:
            if tool["function"]["name"] == name:
                return {"json": tool["function"].get("parameters") or ANY_OBJECT}
        raise RequestRefused(f"tool_choice names the tool {name!r}, which is not among the tools")
    return _format(request.response_format)


def _format(response_format: dict[str, Any] | None) -> dict[str, Any] | None:
    kind = (response_format or {}).get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    schema = (response_format or {}).get("json_schema")
    if kind != "json_schema" or not isinstance(schema, dict) or "schema" not in schema:
        raise RequestRefused(
            f"response_format {kind!r}: use text, json_object, or json_schema with a schema"
        )
    return {"json": schema["schema"]}


def _calls(request: ChatRequest) -> dict[str, Any]:
    """The schema of one or more calls of any tool; definitions move to the top, as JSON asks."""
    definitions: dict[str, Any] = {}
    calls = []
    for tool in request.tools:
        parameters = dict(tool["function"].get("parameters") or ANY_OBJECT)
        definitions |= parameters.pop("$defs", {})
        name = {"type": "string", "enum": [tool["function"]["name"]]}
        properties = {"name": name, "parameters": parameters}
        calls.append({"properties": properties, "required": ["name", "parameters"]})
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"type": "object", "anyOf": calls},
    }
    if not request.parallel_tool_calls:
        schema["maxItems"] = 1
    return schema | ({"$defs": definitions} if definitions else {})
