"""What the built images hold and do, asked from inside a container as locked up as a stage's."""

import json
import re
import shlex

import pytest
from testinfra.host import Host

from tests.images import checks
from tests.images.conftest import TAGS, VERSION, locked, tag_of
from tests.images.running import package_here, package_of, running
from tests.images.saved import read_image

pytestmark = pytest.mark.images

PYTHON = checks.PYTHON
LIST = """
import importlib.metadata, json
print(json.dumps({one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}))
"""
# As a server's process does it; SGLang itself only logs a hook that it cannot set.
HOOK = """
import json, os, pathlib, tempfile
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "capture.json").write_text(json.dumps({
    "staging": str(folder), "quota_bytes": 1, "taps": [1], "rid_prefix": "cs-", "ring_bytes": 1,
    "writer_threads": 1, "timeout_seconds": 1.0,
}))
os.environ["CLEANSLATE_CAPTURE"] = str(folder / "capture.json")
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
ours = [
    target for target, hooks in HookRegistry._hooks.items()
    if any(source.dist_name == "cleanslate" for _, _, source in hooks)
]
print(json.dumps({"wanted": sorted(ours), "set": sorted(set(ours) & HookRegistry._patched)}))
"""


def test_the_user_is_nobody_s(host: Host) -> None:
    user = host.check_output("id -u && id -g").split()
    assert all(int(one) > 0 for one in user)


def test_a_container_cannot_write_but_where_it_is_let(host: Host) -> None:
    for folder in ("/", "/opt/cleanslate", "/usr/local", "/var/lib", "/home"):
        assert host.run("touch %s/new", folder).rc != 0, folder
    assert host.check_output("touch /tmp/new && echo done") == "done"


def test_a_container_has_no_capability(host: Host) -> None:
    status = host.file("/proc/self/status").content_string
    assert "CapEff:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status


def test_every_python_package_is_the_locked_one(name: str, host: Host) -> None:
    found = json.loads(host.check_output(f"{PYTHON} -I -c %s", LIST))
    versions = {checks.plain(one): version.partition("+")[0] for one, version in found.items()}
    versions.pop("pip", None)  # Debian's, which makes the virtual environment
    wanted = {**locked(name, versions), "cleanslate": VERSION}
    if name == "extractor-cpu":
        wanted["cleanslate-sglang-cpu"] = "1"  # docker/extractor/cpu
    assert checks.differences(versions, wanted) == []


def test_the_package_is_that_of_this_tree(host: Host) -> None:
    assert checks.differences(package_of(host), package_here()) == []


def test_the_command_line_answers(host: Host) -> None:
    shown = host.check_output(f"cd / && {PYTHON} -m pipeline.cli show --profile tiny")
    assert 'run.name = "tiny"' in shown


def test_every_hook_of_the_capture_resolves(extractor: str) -> None:
    with running(TAGS[extractor]) as host:
        said = host.check_output(f"{PYTHON} -m pipeline.capture.sglang_plugin.resolve")
    assert said.startswith("all 3 hooks resolve in SGLang ")


def test_sglang_sets_every_hook_of_the_capture() -> None:
    with running(tag_of("extractor-cpu")) as host:  # the other cannot import all without a GPU
        hooks = json.loads(host.check_output(f"{PYTHON} -I -c %s", HOOK).splitlines()[-1])
    assert len(hooks["wanted"]) == 3
    assert hooks["set"] == hooks["wanted"]


def test_the_health_check_of_the_extractor_is_well_without_a_server(extractor: str) -> None:
    check = read_image(TAGS[extractor]).config["config"]["Healthcheck"]
    kind, *command = check["Test"]
    assert kind == "CMD"
    assert check["Timeout"] >= 25e9  # what the check itself waits for a server
    with running(TAGS[extractor]) as host:
        assert host.check_output(shlex.join(command)) == "no server"


def test_the_cuda_extractor_has_what_compiles_kernels_for_sm120() -> None:
    with running(tag_of("extractor")) as host:
        found = host.check_output("nvcc --version")
        release = re.search(r"release (\d+)\.(\d+)", found)
        assert release is not None
        assert (int(release[1]), int(release[2])) >= (12, 9)  # FlashInfer's least for SM120
        assert "g++" in host.check_output("g++ --version")
