"""What a call to the Web API carries: its arguments, in whichever form they came, and warnings about the form.

docs.slack.dev/apis/web-api and the errors and warnings that every method's page lists.
"""

from urllib.parse import parse_qsl

import msgspec
from starlette.requests import Request

from bot.workspace.multipart import parts_of
from bot.workspace.refusals import RefusedError
from bot.workspace.world import Json

_FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")
_CHARSETS = ("utf-8", "utf8", "iso-8859-1")


class Body(msgspec.Struct, frozen=True):
    """The arguments of a call; whether they came as JSON; `missing_charset` or `superfluous_charset`, or empty."""

    arguments: Json
    json: bool = False
    warning: str = ""


async def read_body(request: Request) -> Body:
    """The arguments of a call, from its address and its body.

    Raises: RefusedError, with `missing_post_type`, `invalid_post_type`, `invalid_charset`, `invalid_json`,
        `json_not_object` or `invalid_form_data`.
    """
    arguments: Json = dict(request.query_params)
    content = await request.body()
    if request.method == "GET" or not content:
        return Body(arguments)
    header = request.headers.get("content-type", "")
    kind, _, parameters = (part.strip().lower() for part in header.partition(";"))
    if not kind:
        raise RefusedError("missing_post_type")
    charset = _charset(parameters)
    if charset and charset not in _CHARSETS:
        raise RefusedError("invalid_charset")
    if kind in _FORMS:
        warning = "superfluous_charset" if charset else ""
        return Body(arguments | _form(header, kind, content), warning=warning)
    warning = "" if charset else "missing_charset"
    if kind == "application/json":
        return Body(arguments | _object(content), json=True, warning=warning)
    if kind == "text/plain":
        return Body(arguments, warning=warning)
    raise RefusedError("invalid_post_type")


def _charset(parameters: str) -> str:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip() == "charset":
            return value.strip().strip('"')
    return ""


def _object(content: bytes) -> Json:
    try:
        decoded = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError):
        raise RefusedError("invalid_json") from None
    if not isinstance(decoded, dict):
        raise RefusedError("json_not_object")
    decoded.pop("token", None)  # with a JSON body only the header counts
    return decoded


def _form(header: str, kind: str, content: bytes) -> Json:
    try:
        if kind == "application/x-www-form-urlencoded":
            return dict(parse_qsl(content.decode("utf-8", "replace"), keep_blank_values=True))
        parts = parts_of(header, content)
    except ValueError:
        raise RefusedError("invalid_form_data") from None
    return {part.name: part.content.decode("utf-8", "replace") for part in parts if part.filename is None}
