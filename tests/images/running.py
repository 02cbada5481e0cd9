"""A container of an image that does nothing, as locked up as a stage's, to look at from inside."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import testinfra
from testinfra.host import Host

from pipeline.slate.files import sha256_file

_ROOT = Path(__file__).parents[2]
LOCKED_UP = (
    *("--network", "none", "--read-only", "--cap-drop", "ALL"),
    *("--security-opt", "no-new-privileges", "--init"),
    *("--tmpfs", "/tmp:rw,exec,nosuid,nodev,size=1g"),  # noqa: S108  inside the container
    *("--env", "HOME=/tmp"),
)


def docker(*arguments: str) -> str:
    """What a docker command prints; its complaint is in the error."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@contextmanager
def running(image: str, *options: str) -> Iterator[Host]:
    """A host for testinfra, which asks by `docker exec`."""
    container = docker(
        *("run", "--detach", *LOCKED_UP, *options, "--entrypoint", "sleep", image, "3600")
    )
    try:
        yield testinfra.get_host(f"docker://{container}")
    finally:
        docker("rm", "--force", "--volumes", container)


def package_of(host: Host) -> dict[str, str]:
    """Path -> sha256 of each file of our package, as it is installed."""
    listed = host.check_output(
        "cd /opt/cleanslate/lib/python3.11/site-packages && "
        "find pipeline -type f ! -name '*.pyc' -exec sha256sum {} +"
    )
    lines = (line.partition("  ") for line in listed.splitlines())
    return {path: digest for digest, _, path in lines}


def package_here() -> dict[str, str]:
    """Path -> sha256 of each file of our package, in this tree."""
    files = [path for path in (_ROOT / "pipeline").rglob("*") if path.is_file()]
    return {
        str(path.relative_to(_ROOT)): sha256_file(path)
        for path in files
        if "__pycache__" not in path.parts
    }
