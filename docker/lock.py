"""Writes the hash-locked requirements from the .in files. Run it by `make lock`.

torch comes in two builds of one version: PyPI's, which needs CUDA libraries, and a CPU build where
somebody offers one (pip's find-links). One lock serves both: `requirements-torch.txt` admits the
hashes of both builds, `requirements.txt` pins everything else but the CUDA libraries, and
`requirements-cuda.txt` pins these, which set-up installs only when the chosen build asks for them.
torch has a file of its own because pip, given hashes, prefers an index (which states them) to a
file in find-links (which does not): set-up asks find-links alone first.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
TRAINER = ROOT / "docker" / "trainer"
TESTS = ROOT / "tests"
ANSIBLE = ROOT / "ansible"
HEAD = "# Written by `make lock` from the .in file beside it. Do not edit.\n"
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)", re.MULTILINE)


def compile_lock(source: Path, *, plain_index: bool) -> dict[str, str]:
    """Package -> its block of lines, as pip-compile gives them.

    plain_index: leave out the machine's find-links, so that PyPI's builds are taken.
    """
    environment = dict(os.environ)  # noqa: TID251  pip's own configuration, passed on
    if plain_index:
        environment["PIP_CONFIG_FILE"] = os.devnull
        environment.pop("PIP_FIND_LINKS", None)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "lock.txt"
        subprocess.run(
            [
                *(sys.executable, "-m", "piptools", "compile", "--quiet", "--generate-hashes"),
                *("--allow-unsafe", "--strip-extras", "--no-emit-index-url"),
                *("--no-emit-find-links", "--no-header", "--no-annotate"),
                *("--output-file", str(out), str(source)),
            ],
            check=True,
            env=environment,
        )
        text = out.read_text(encoding="utf-8")
    starts = [match.start() for match in _PIN.finditer(text)]
    blocks = [text[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
    return {block.partition("==")[0]: block for block in blocks}


def hashes(block: str) -> list[str]:
    """The hashes of a block, sorted."""
    return sorted(set(re.findall(r"--hash=(sha256:[0-9a-f]{64})", block)))


def main() -> None:
    """Writes the five locks."""
    own = compile_lock(TRAINER / "requirements.in", plain_index=False)
    public = compile_lock(TRAINER / "requirements.in", plain_index=True)
    version = _PIN.match(public["torch"])[2]  # type: ignore[index]
    both = sorted({*hashes(own["torch"]), *hashes(public["torch"])})
    torch = " \\\n    ".join([f"torch=={version}", *(f"--hash={one}" for one in both)])
    cuda = {name for name in public if name.startswith(("nvidia-", "cuda-")) or name == "triton"}
    cuda -= {"nvidia-ml-py"}
    base = {name: block for name, block in public.items() if name not in cuda}
    _write(TRAINER / "requirements-torch.txt", [torch])
    _write(TRAINER / "requirements.txt", [one for name, one in base.items() if name != "torch"])
    _write(TRAINER / "requirements-cuda.txt", [public[name] for name in sorted(cuda)])
    tests = compile_lock(TESTS / "requirements.in", plain_index=False)
    _write(TESTS / "requirements.txt", [block for name, block in tests.items() if name not in base])
    hosts = compile_lock(ANSIBLE / "requirements.in", plain_index=False)
    _write(ANSIBLE / "requirements.txt", list(hosts.values()))


def _write(path: Path, blocks: list[str]) -> None:
    path.write_text(HEAD + "\n".join(blocks) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
