"""Files: the three steps in which one is uploaded, when it may be used, and who gets to see it.

The steps are those of docs.slack.dev/messaging/working-with-files. Slack works on a file after the last
step (it looks for viruses, makes previews), and until that is done an image block cannot show it.
"""

import mimetypes
import secrets
from collections.abc import Callable

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from bot.workspace.multipart import parts_of
from bot.workspace.world import Json, User, World, new_id

# What is kept, since it is kept in memory: one file, and all together; the oldest go first.
FILE_BYTES = 16 * 2**20
ALL_BYTES = 64 * 2**20
_FORM_BYTES = 4096  # what a form may have around a file
PROCESSING = 1.0  # seconds; Slack says only that it takes a moment
_MAGIC = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}


class File(msgspec.Struct, frozen=True):
    """One file. `size` was announced, in bytes; `content` is None until it arrived; `ready` is the time from
    which it may be used, None until the upload was completed; `key` opens it for the page, to nobody else."""

    id: str
    name: str
    title: str
    user: str
    size: int
    created: int
    alt_txt: str
    key: str
    content: bytes | None = None
    ready: float | None = None

    @property
    def mimetype(self) -> str:
        """What its first bytes say, else what its name says."""
        for magic, mimetype in _MAGIC.items():
            if (self.content or b"").startswith(magic):
                return mimetype
        named = mimetypes.guess_type(self.name)[0] or "application/octet-stream"
        return "application/octet-stream" if named in _MAGIC.values() else named


class Files:
    """All files of the workspace. `processing` is how long (seconds) Slack works on each."""

    def __init__(self, world: World, address: Callable[[], str], processing: float) -> None:
        self._world = world
        self._address = address
        self._processing = processing
        self._files: dict[str, File] = {}
        self._tickets: dict[str, str] = {}

    # The three steps

    def ticket(self, name: str, size: int, alt_txt: str) -> tuple[str, File]:
        """First: an address to send the content to, and the file that it will become."""
        file = File(
            id=new_id("F"),
            name=name,
            title=name,
            user=self._world.bot.id,
            size=size,
            created=int(self._world.clock.now()),
            alt_txt=alt_txt,
            key=secrets.token_urlsafe(18),
        )
        self._keep(file)
        ticket = secrets.token_urlsafe(24)
        self._tickets[ticket] = file.id
        return f"http://{self._address()}/upload/v1/{ticket}", file

    async def receive(self, request: Request) -> Response:
        """Second: the content, raw or as a form's file. Its length must be the one that was announced."""
        file = self._files.get(self._tickets.get(request.path_params["ticket"], ""))
        if file is None or file.ready is not None:
            return PlainTextResponse("there is no upload here", 404)
        try:
            content = await _content(request, file.size)
        except ClientDisconnect:
            return PlainTextResponse("the upload broke off", 400)
        if content is None or len(content) != file.size:
            return PlainTextResponse(f"{file.size} bytes were announced, and others came", 400)
        self._keep(msgspec.structs.replace(file, content=content))
        return PlainTextResponse(f"OK - {file.size}")

    def complete(self, id: str, title: str) -> File | None:
        """Third: the end of the upload; None where there is no such file, or nothing was sent."""
        file = self._files.get(id)
        if file is None or file.content is None:
            return None
        ready = self._world.clock.now() + self._processing
        done = msgspec.structs.replace(file, title=title or file.title, ready=ready)
        self._keep(done)
        return done

    def when_ready(self, call: Callable[[], None]) -> None:
        """Run `call` when Slack has done its work on what is completed now."""
        self._world.clock.after(self._processing, call)

    def add(self, user: User, name: str, content: bytes) -> File:
        """A file that a person put in, ready at once."""
        _, file = self.ticket(name, len(content), "")
        file = msgspec.structs.replace(file, user=user.id, content=content, ready=self._world.clock.now())
        self._keep(file)
        return file

    # Looking at them

    def get(self, id: str) -> File | None:
        """The file with this id."""
        return self._files.get(id)

    def is_ready(self, file: File) -> bool:
        """Whether Slack has done its work on it."""
        return file.ready is not None and file.ready <= self._world.clock.now()

    def shows(self, reference: Json) -> bool:
        """Whether an image block may show what its `slack_file` (`{"id"}` or `{"url"}`) names."""
        file = self._named(reference)
        return file is not None and self.is_ready(file) and file.mimetype in _MAGIC.values()

    def page_path(self, reference: Json) -> str | None:
        """The path at which the page finds the picture of an image block, None where there is none."""
        file = self._named(reference)
        return None if file is None else f"/files/{file.key}"

    def json(self, file: File) -> Json:
        """A file as in `files.info`; before Slack has looked at it, it does not know what it is."""
        known = self.is_ready(file)
        kind = file.mimetype if known else ""
        return {
            "id": file.id,
            "created": file.created,
            "timestamp": file.created,
            "name": file.name,
            "title": file.title,
            "mimetype": kind,
            "filetype": kind.rpartition("/")[2],
            "user": file.user,
            "size": file.size,
            "mode": "hosted",
            "is_external": False,
            "is_public": False,
            "public_url_shared": False,
            "url_private": self._private(file),
            "url_private_download": f"{self._private(file)}?download=1",
            "permalink": f"http://{self._address()}/files-link/{file.id}",
            **({"alt_txt": file.alt_txt} if file.alt_txt else {}),
        }

    async def for_the_app(self, request: Request, token: str) -> Response:
        """The content at `url_private`, for whoever has the app's token."""
        file = self._files.get(request.path_params["id"].rpartition("-")[2])
        if request.headers.get("authorization") != f"Bearer {token}":
            return PlainTextResponse("this needs the app's token", 403)
        return _shown(file)

    async def for_the_page(self, request: Request) -> Response:
        """The content for a browser: it has no token, so the address itself cannot be guessed."""
        key = request.path_params["key"]
        return _shown(next((file for file in self._files.values() if file.key == key), None))

    # Inside

    def _named(self, reference: Json) -> File | None:
        if "id" in reference:
            return self._files.get(str(reference["id"]))
        urls = (reference.get("url"),)
        return next(
            (
                file
                for file in self._files.values()
                if self._private(file) in urls or self.json(file)["permalink"] in urls
            ),
            None,
        )

    def _private(self, file: File) -> str:
        return f"http://{self._address()}/files-pri/{self._world.team_id}-{file.id}/{file.name}"

    def _keep(self, file: File) -> None:
        self._files[file.id] = file
        held = sum(kept.size for kept in self._files.values())
        while held > ALL_BYTES and len(self._files) > 1:
            held -= self._files.pop(next(iter(self._files))).size


def pictured(block: Json, picture: Callable[[Json], str | None]) -> Json:
    """A block whose pictures have an `image_url` where they name a `slack_file`; `picture` gives it."""

    def with_url(node: Json) -> Json:
        if "slack_file" not in node:
            return node
        return {**node, "image_url": picture(node["slack_file"]) or ""}

    if block["type"] == "image":
        return with_url(block)
    if block["type"] == "context":
        return {**block, "elements": [with_url(element) for element in block["elements"]]}
    if "accessory" in block:
        return {**block, "accessory": with_url(block["accessory"])}
    return block


async def _content(request: Request, size: int) -> bytes | None:
    """The file in a request, None where it is no form that holds one, or far longer than `size` bytes."""
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > size + _FORM_BYTES:
            return None
    header = request.headers.get("content-type", "")
    if not header.startswith("multipart/form-data"):
        return bytes(content)
    try:
        parts = parts_of(header, bytes(content))
    except ValueError:
        return None
    return next((part.content for part in parts if part.filename is not None), None)


def _shown(file: File | None) -> Response:
    if file is None or file.content is None:
        return PlainTextResponse("there is no such file", 404)
    # Only pictures are shown; anything else is handed over as bytes, so that no browser runs it.
    picture = file.mimetype in _MAGIC.values()
    kind = file.mimetype if picture else "application/octet-stream"
    headers = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "default-src 'none'"}
    if not picture:
        headers["Content-Disposition"] = "attachment"
    return Response(file.content, media_type=kind, headers=headers)
