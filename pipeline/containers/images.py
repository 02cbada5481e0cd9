"""The built images: what `make images` recorded of them, and whether they hold this tree's code."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pipeline.containers.errors import ContainerError
from pipeline.settings.strict_json import parse_json, read_plain

_SUFFIXES = (".py", ".yaml", ".jsonl", ".j2")  # what of the package decides what it does


@dataclass(frozen=True)
class Image:
    """One image: its name, the id that the engine gave it, and what it was built for.

    base: id of the image that it was built on.
    """

    name: str
    id: str
    variant: str
    base: str


@dataclass(frozen=True)
class BuiltImages:
    """What `make images` built: from which version and commit.

    inputs: sha256 of each file that decides what is in an image, and of the package as a whole.
    """

    version: str
    commit: str
    images: Mapping[str, Image]
    inputs: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads images.json. ContainerError when it is absent or of another shape."""
        try:
            value = parse_json(read_plain(path))
            version = str(value["version"])
            images = {
                kind: Image(
                    _name(kind, version, one),
                    str(one["id"]),
                    str(one.get("variant")),
                    # The extractor that compiles kernels has a base with a compiler.
                    str(value.get(f"{kind}_base", value["base"])["id"]),
                )
                for kind, one in value["images"].items()
            }
            commit = f"{value['commit']}{'+changes' if value['dirty'] else ''}"
            return cls(version, commit, images, dict(value["inputs"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ContainerError(
                f"{path}: {type(error).__name__}: {error}",
                wanted="the record of the built images",
                next_step="make images",
            ) from error

    def image(self, kind: str) -> Image:
        """The image of a kind, `trainer` or `extractor`. ContainerError when it was not built."""
        if kind not in self.images:
            raise ContainerError(
                f"the built images are {', '.join(sorted(self.images)) or 'none'}",
                wanted=f"the image {kind}, which this stage runs in",
                next_step="make images",
            )
        return self.images[kind]

    def provenance(self, kind: str) -> dict[str, Any]:
        """What a manifest says of the image of a kind. ContainerError when it was not built."""
        image = self.image(kind)
        inputs = dict(self.inputs)
        return {"name": image.name, "id": image.id, "base": image.base, "inputs": inputs}


def _name(kind: str, version: str, image: Mapping[str, Any]) -> str:
    tag = f"{version}-cpu" if kind == "extractor" and image.get("variant") == "cpu" else version
    return f"cleanslate-{kind}:{tag}"


def check_same_code(tree: Path, installed: Path) -> None:
    """Compares the package in the image with this tree's, byte for byte. ContainerError if not so.

    tree, installed: the two folders `pipeline`.
    """
    here, there = _code(tree), _code(installed)
    different = sorted(name for name in {*here, *there} if here.get(name) != there.get(name))
    if different:
        raise ContainerError(
            f"the image has other code than this folder: {len(different)} files of pipeline/ "
            f"differ (first: {different[0]})",
            wanted="images that were built from this tree",
            next_step="make images",
        )


def _code(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.suffix in _SUFFIXES and path.is_file()
    }
