"""An image as `docker save` gives it: its configuration, and every file of every layer."""

import hashlib
import io
import json
import posixpath
import re
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import IO, Any

_READ_BYTES = 4 << 20  # nobody mislays a certificate, key or password in a larger file
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----([A-Za-z0-9+/=\s]{200,})-----END")
_PRIVATE_KEY = re.compile(
    rb"^-----BEGIN ([A-Z]+ )?PRIVATE KEY-----\r?\n[A-Za-z0-9+/]", re.MULTILINE
)
_PASSWORD = re.compile(rb"https?://[^\s/:@\"'<>{}$%]+:[^\s/:@\"'<>{}$%]+@[a-z0-9]")


@dataclass(frozen=True)
class Entry:
    """One file of one layer. certificates: sha256 of each that it holds."""

    path: str
    mode: int
    is_file: bool
    certificates: frozenset[str] = frozenset()
    private_key: bool = False
    password: bool = False


@dataclass(frozen=True)
class SavedImage:
    """config: as the engine keeps it. layers: the lowest first."""

    config: dict[str, Any]
    layers: list[list[Entry]] = field(repr=False)

    @property
    def entries(self) -> Iterator[Entry]:
        """Of all layers, also those that a later layer hides."""
        return (entry for layer in self.layers for entry in layer)

    def merged(self) -> dict[str, Entry]:
        """Path -> entry, of what a container sees."""
        seen: dict[str, Entry] = {}
        for layer in self.layers:
            for entry in layer:
                folder, name = posixpath.split(entry.path)
                if name.startswith(".wh."):  # what lower layers have there is gone
                    opaque = name == ".wh..wh..opq"
                    gone = folder if opaque else posixpath.join(folder, name[len(".wh.") :])
                    seen = {p: e for p, e in seen.items() if not f"{p}/".startswith(f"{gone}/")}
            seen |= {one.path: one for one in layer if "/.wh." not in f"/{one.path}"}
        return seen


def certificates_in(content: bytes) -> frozenset[str]:
    """sha256 of the text of each certificate in a PEM file, its blanks left out."""
    bodies = (re.sub(rb"\s", b"", body) for body in _CERTIFICATE.findall(content))
    return frozenset(hashlib.sha256(body).hexdigest() for body in bodies)


def read_layer(stream: IO[bytes]) -> list[Entry]:
    """The entries of a layer, plain or compressed. tarfile.ReadError when it is none."""
    found = []
    with tarfile.open(fileobj=stream, mode="r|*") as layer:
        for member in layer:
            path = posixpath.normpath(member.name).lstrip("/")
            content = b""
            if member.isreg() and member.size < _READ_BYTES:
                file = layer.extractfile(member)
                assert file is not None
                content = file.read()
            found.append(
                Entry(
                    path,
                    member.mode,
                    member.isreg(),
                    certificates_in(content) if b"-----BEGIN CERT" in content else frozenset(),
                    # Gigabytes: a plain search first, which is many times faster.
                    b"PRIVATE KEY-----" in content and _PRIVATE_KEY.search(content) is not None,
                    b"@" in content and _PASSWORD.search(content) is not None,
                )
            )
    return found


@cache
def read_image(image: str) -> SavedImage:
    """Reads an image of this machine's engine as it comes, in either of the two formats."""
    layers: dict[str, list[Entry]] = {}
    documents: dict[str, bytes] = {}
    same: dict[str, str] = {}
    with (
        subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as archive,
    ):
        for member in archive:
            if member.issym():  # the older format gives a repeated layer so
                target = posixpath.join(posixpath.dirname(member.name), member.linkname)
                same[member.name] = posixpath.normpath(target)
            content = archive.extractfile(member) if member.isreg() else None
            if content is None:
                continue
            if member.size < _READ_BYTES:
                documents[member.name] = content.read()
            else:
                layers[member.name] = read_layer(content)
        assert process.stdout is not None
        process.stdout.read()  # padding: unread, it would stop the writer
    assert process.returncode == 0, f"docker save {image} failed"
    [told] = json.loads(documents["manifest.json"])
    names = [same.get(name, name) for name in told["Layers"]]
    return SavedImage(
        json.loads(documents[told["Config"]]),
        [layers.get(n) or read_layer(io.BytesIO(documents[n])) for n in names],
    )
