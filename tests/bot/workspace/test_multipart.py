"""Forms as httpx writes them are read back byte for byte; what is no form is refused."""

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bot.workspace.multipart import Part, parts_of


@given(st.binary(max_size=200), st.text(max_size=20))
def test_fields_and_files_come_back_whole(content: bytes, text: str) -> None:
    request = httpx.Request("POST", "http://x/", data={"note": text}, files={"file": ("a b.png", content)})
    note, file = parts_of(request.headers["content-type"], request.read())
    assert note == Part("note", None, text.encode("utf-8", "surrogatepass"))
    assert file == Part("file", "a b.png", content)


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ("multipart/form-data", b""),
        ("multipart/form-data; boundary=x", b""),
        ("multipart/form-data; boundary=x", b"--x\r\n\r\nno name\r\n--x--"),
        ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nno end'),
        ("text/plain; boundary=x", b"--x--"),
    ],
)
def test_what_is_no_form_is_refused(header: str, body: bytes) -> None:
    with pytest.raises(ValueError, match=r"boundary|name"):
        parts_of(header, body)


@given(st.binary(max_size=100), st.text(max_size=30))
def test_no_bytes_break_it(body: bytes, header: str) -> None:
    for head in (f"multipart/form-data; boundary={header}", "multipart/form-data; boundary=x"):
        try:
            parts_of(head, b"--x\r\n" + body + b"\r\n--x--")
        except ValueError:
            continue
