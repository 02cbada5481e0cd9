"""tests/host itself: what it wants, what it calls a fault, what it leaves out and says so."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import testinfra

from pipeline.host import codes
from pipeline.host.reader import HostReader, Missing, Output
from tests.host.afar import AfarReader
from tests.host_suite import shapes
from tests.host_suite.suite import ROOT, ask, of_repository, programs, ready_host

FILES = sorted((ROOT / "tests" / "host").glob("*.py"))
GPUS = "tests/host/test_gpus.py"


def test_nothing_wanted_is_nothing_refused(tmp_path: Path) -> None:
    answer = ask(tmp_path, ready_host(), "--deselect=tests/host/test_shm.py::test_dev_shm_has_room")
    assert answer.codes == []
    assert answer.rc == 0, answer.output


def test_a_value_of_this_machine_is_not_refused_and_another_is(tmp_path: Path) -> None:
    name = "kernel.threads-max"
    value = int(Path("/proc/sys/kernel/threads-max").read_text())
    live = "tests/host/test_sysctl.py::test_a_setting_has_its_value"
    assert ask(tmp_path, ready_host(sysctl={name: value}), live).codes == []
    assert ask(tmp_path, ready_host(sysctl={name: value + 1}), live).codes == ["HOST-SYSCTL"]


def test_a_refusal_says_found_wanted_and_what_to_do(tmp_path: Path) -> None:
    wanted = {**of_repository("states_tmpfs"), "path": "/absent/hs"}
    answer = ask(tmp_path, ready_host(states_tmpfs=wanted), "tests/host/test_states_tmpfs.py")
    assert set(answer.codes) == {"HOST-TMPFS-MISSING"}
    line = next(one for one in answer.output.splitlines() if one.startswith("HOST-TMPFS-MISSING"))
    assert re.fullmatch(r"HOST-TMPFS-MISSING: .+; wanted .+; next: .+", line)


def test_without_hosts_nothing_is_asked() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/host", "-p", "no:cacheprovider"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "no tests ran" in done.stdout


@pytest.fixture
def no_gpus(tmp_path: Path) -> Path:
    """lspci of a machine without GPUs."""
    return programs(tmp_path / "bin", lspci="00:00.0 Host bridge [0600]: SIMULATED [8086:1237]\n")


def test_a_machine_without_gpus_is_told_how_much_was_not_looked_at(
    tmp_path: Path, no_gpus: Path
) -> None:
    wanted = ready_host(gpus=of_repository("gpus"))
    answer = ask(tmp_path, wanted, GPUS, first_in_path=no_gpus)
    assert answer.rc == 0, answer.output
    count = ast.unparse(ast.parse(Path(ROOT, GPUS).read_text("utf-8"))).count("\ndef test_")
    assert f"\n{count} hardware checks skipped: no NVIDIA GPU on local\n" in answer.output


def test_gpus_can_be_required(tmp_path: Path, no_gpus: Path) -> None:
    wanted = ready_host(gpus=of_repository("gpus"))
    answer = ask(tmp_path, wanted, GPUS, "--host-gpus=required", first_in_path=no_gpus)
    assert set(answer.codes) == {"HOST-GPU-COUNT"}


def one_gpu(**changed: Any) -> dict[str, Any]:
    gpus = of_repository("gpus") | {"count": 1} | changed
    return ready_host(gpus=gpus, driver=of_repository("driver") | {"packages": {}})


def host_with_one_gpu(folder: Path, **texts: str) -> Path:
    given = {"nvidia_smi": shapes.SMI, "lspci": shapes.LSPCI, "journalctl": shapes.JOURNAL}
    return programs(folder / "bin", **given | texts)


def test_a_simulated_gpu_as_wanted_is_not_refused(tmp_path: Path) -> None:
    answer = ask(tmp_path, one_gpu(), GPUS, first_in_path=host_with_one_gpu(tmp_path))
    assert answer.codes == []
    assert answer.rc == 0, answer.output
    assert "skipped" not in answer.output


SMI_FAULTS = {
    "HOST-GPU-MODEL": ("RTX PRO 6000 Blackwell", "RTX 6000 Ada"),
    "HOST-GPU-MEMORY": (": 97887 MiB", ": 96000 MiB"),
    "HOST-GPU-BAR1": (": 131072 MiB", ": 256 MiB"),
    "HOST-GPU-HELD": (
        "Used                                           : 0 MiB",
        "Used                                           : 4096 MiB",
    ),
    "HOST-GPU-MIG": (
        "Pending                                        : Disabled",
        "Pending                                        : Enabled",
    ),
    "HOST-GPU-PERSISTENCE": (
        "Persistence Mode                                   : Enabled",
        "Persistence Mode                                   : Disabled",
    ),
    "HOST-GPU-POWER": (": 600.00 W", ": 300.00 W"),
    "HOST-GPU-COUNT": ("GPU 00000000:41:00.0\n", "NOTHING\n"),
}


@pytest.mark.parametrize("code", SMI_FAULTS)
def test_a_simulated_fault_that_nvidia_smi_shows_is_named(tmp_path: Path, code: str) -> None:
    old, new = SMI_FAULTS[code]
    assert shapes.SMI.count(old) == 1
    path = host_with_one_gpu(tmp_path, nvidia_smi=shapes.SMI.replace(old, new))
    assert ask(tmp_path, one_gpu(), GPUS, first_in_path=path).codes == [code]


@pytest.mark.parametrize(
    ("code", "texts"),
    [
        ("HOST-GPU-LINK", {"lspci": shapes.LSPCI.replace("Width x16 (ok)", "Width x8")}),
        ("HOST-GPU-XID", {"journalctl": shapes.JOURNAL + shapes.XID}),
        ("HOST-GPU-MISMATCH", {"nvidia_smi": f"#!/bin/sh\necho '{shapes.MISMATCH}'\nexit 18\n"}),
        ("HOST-GPU-DRIVER", {"nvidia_smi": "#!/bin/sh\necho 'No devices were found'\nexit 6\n"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_simulated_fault_elsewhere_is_named(
    tmp_path: Path, code: str, texts: dict[str, str]
) -> None:
    path = host_with_one_gpu(tmp_path, **texts)
    assert ask(tmp_path, one_gpu(), GPUS, first_in_path=path).codes == [code]


def test_a_simulated_port_that_redirects_is_named(tmp_path: Path) -> None:
    redirecting = shapes.LSPCI.replace("TransBlk- ReqRedir-", "TransBlk- ReqRedir+")
    path = host_with_one_gpu(tmp_path, lspci=redirecting)
    wanted = ready_host(kernel={"command_line": [], "acs_redirect": "cleared", "headers": False})
    answer = ask(tmp_path, wanted, "tests/host/test_kernel.py", first_in_path=path)
    assert answer.codes == ["HOST-KERNEL-ACS"]


def test_an_older_driver_is_named(tmp_path: Path) -> None:
    path = host_with_one_gpu(tmp_path, nvidia_smi=shapes.SMI.replace("580.95.05", "575.57.08"))
    answer = ask(tmp_path, one_gpu(), "tests/host/test_driver.py", first_in_path=path)
    assert answer.codes == ["HOST-DRIVER-BRANCH"]


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ('{"training": {"NCCL_PROTO": "LL"}, "extraction": {}}', []),
        ('{"training": {}, "extraction": {}}', ["HOST-NCCL-PROFILE"]),
        ("#!/bin/sh\necho 'Permission denied' >&2\nexit 1\n", ["HOST-NCCL-PROFILE"]),
    ],
    ids=["as wanted", "another", "unreadable"],
)
def test_a_simulated_file_of_nccls_variables_is_judged(
    tmp_path: Path, text: str, codes: list[str]
) -> None:
    wanted = ready_host(nccl={"extraction": {}, "training": {"NCCL_PROTO": "LL"}})
    path = programs(tmp_path / "bin", cat=text)
    answer = ask(tmp_path, wanted, "tests/host/test_nccl.py", first_in_path=path)
    assert answer.codes == codes
    assert (answer.rc == 0) is (codes == []), answer.output


def test_the_reader_from_afar_sees_what_the_one_here_sees(tmp_path: Path) -> None:
    (tmp_path / "a b").write_text("one\n")
    here, afar = HostReader(), AfarReader(testinfra.get_host("local://"))
    for path in (str(tmp_path / "a b"), str(tmp_path), "/proc/self/mounts"):
        assert afar.entry(path) == here.entry(path)
        assert isinstance(afar.room(path), type(here.room(path)))
    assert afar.text(str(tmp_path / "a b")) == "one\n"
    assert afar.names(str(tmp_path)) == ("a b",)
    assert isinstance(afar.text("/absent"), Missing)
    assert isinstance(afar.entry("/absent"), Missing)
    assert afar.command("sh", "-c", "echo 'a b'; echo c >&2; exit 3") == Output(3, "a b\n", "c\n")
    assert isinstance(afar.command("no-such-command"), Missing)


def test_a_command_that_hangs_is_a_result() -> None:
    afar = AfarReader(testinfra.get_host("local://"))
    done = afar.command("sleep", "5", seconds=0.3)
    assert isinstance(done, Missing)
    assert done.hung


def strings_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {node.value for node in nodes if isinstance(node.value, str)}


def test_every_code_is_one_that_preflight_knows() -> None:
    used = {text for path in FILES for text in strings_of(path) if text.startswith("HOST-")}
    assert used
    assert used <= set(codes.CODES)


def test_every_role_that_is_named_is_there() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in FILES)
    roles = set(re.findall(r'by_role\("(\w+)"\)', text))
    assert roles
    assert roles <= {path.name for path in (ROOT / "ansible" / "roles").iterdir()}
