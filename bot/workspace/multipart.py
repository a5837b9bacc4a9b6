"""Bodies of the kind multipart/form-data (RFC 7578), read whole: what a workspace gets is small."""

from email.message import Message as Headers

import msgspec

PARTS = 100  # more than any call has


class Part(msgspec.Struct, frozen=True):
    """One field of a form: its name, its file's name where it is a file, and its bytes."""

    name: str
    filename: str | None
    content: bytes


def parts_of(content_type: str, body: bytes) -> list[Part]:
    """The fields of a form, in order.

    Raises: ValueError, when that is no such form.
    """
    headers = Headers()
    headers["Content-Type"] = content_type
    boundary = headers.get_param("boundary")
    if headers.get_content_type() != "multipart/form-data" or not isinstance(boundary, str) or not boundary:
        raise ValueError("the header names no boundary")
    pieces = (b"\r\n" + body).split(b"\r\n--" + boundary.encode(), PARTS + 1)[1:]
    if not pieces or not pieces[-1].startswith(b"--"):
        raise ValueError("the closing boundary is missing")
    return [_part(piece) for piece in pieces[:-1]]


def _part(piece: bytes) -> Part:
    head, blank, content = piece.lstrip(b" \t").removeprefix(b"\r\n").partition(b"\r\n\r\n")
    headers = Headers()
    for line in head.decode("utf-8", "replace").split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition":
            headers["Content-Disposition"] = value.strip()
    name = headers.get_param("name", header="Content-Disposition")
    if not blank or not isinstance(name, str):
        raise ValueError("a part has no name")
    return Part(name, headers.get_filename(), content)
