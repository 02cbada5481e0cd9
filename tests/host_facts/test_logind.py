from collections.abc import Callable

import pytest

from pipeline.host.logind import RemoveIpc, read_remove_ipc, remove_ipc_configured
from pipeline.host.reader import Missing, Output, Reader

pytestmark = pytest.mark.usefixtures("simulated")

BUSCTL = "busctl get-property org.freedesktop.login1"


@pytest.mark.parametrize(
    ("texts", "on"),
    [
        ((), True),  # systemd's default
        (("[Login]\n#RemoveIPC=no\n",), True),
        (("[Login]\nRemoveIPC=no\n",), False),
        (("[Login]\n  RemoveIPC =  Off\n",), False),
        (("[Login]\nRemoveIPC=no\n", "[Login]\nRemoveIPC=Yes\n"), True),
        (("[Login]\nRemoveIPC=no\n", "[Login]\nRemoveIPC=yes\n"), True),
        (("[Login]\nRemoveIPC=yes\n", "[Login]\nRemoveIPC=no\n"), False),
        (("[Login]\nRemoveIPC=no\nRemoveIPC=\n",), True),  # emptied: the default again
        (("[Sleep]\nRemoveIPC=no\n",), True),
    ],
)
def test_the_last_word_of_the_section_counts(texts: tuple[str, ...], on: bool) -> None:
    assert remove_ipc_configured(texts) is on


def test_drop_ins_are_merged_by_name_over_all_folders(recorded: Callable[..., Reader]) -> None:
    files = {
        "/etc/systemd/logind.conf": "[Login]\nRemoveIPC=yes\n",
        "/usr/lib/systemd/logind.conf.d/90-vendor.conf": "[Login]\nRemoveIPC=yes\n",
        "/etc/systemd/logind.conf.d/90-vendor.conf": "[Login]\nKillUserProcesses=no\n",
        "/etc/systemd/logind.conf.d/60-ours.conf": "[Login]\nRemoveIPC=no\n",
        "/etc/systemd/logind.conf.d/99.conf.bak": "[Login]\nRemoveIPC=yes\n",
    }
    found = read_remove_ipc(recorded(files, {BUSCTL: "b false\n"}))
    assert found == RemoveIpc(configured=False, live=False)


def test_a_logind_that_has_not_read_its_files_is_told_apart(
    recorded: Callable[..., Reader],
) -> None:
    files = {"/etc/systemd/logind.conf": "[Login]\nRemoveIPC=no\n"}
    found = read_remove_ipc(recorded(files, {BUSCTL: "b true\n"}))
    assert found == RemoveIpc(configured=False, live=True)


@pytest.mark.parametrize("said", [Output(1, "", "Failed to connect to bus"), Output(0, "?")])
def test_a_logind_that_does_not_answer_is_not_known(
    recorded: Callable[..., Reader], said: Output
) -> None:
    assert isinstance(read_remove_ipc(recorded({}, {BUSCTL: said})).live, Missing)
    assert isinstance(read_remove_ipc(recorded()).live, Missing)
