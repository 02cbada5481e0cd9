from collections.abc import Callable

from pipeline.host.reader import HostReader, Missing, Reader
from pipeline.host.sysctl import path_of, read_sysctl


def test_names_are_paths_and_a_slash_is_a_dot() -> None:
    assert path_of("vm.swappiness") == "/proc/sys/vm/swappiness"
    assert path_of("net.ipv4.conf.eth0/1.forwarding") == "/proc/sys/net/ipv4/conf/eth0.1/forwarding"


def test_values_are_live_and_one_that_is_not_there_is_missing(
    recorded: Callable[..., Reader],
) -> None:
    reader = recorded({"/proc/sys/net/ipv4/tcp_rmem": "4096\t131072\t6291456\n"})
    found = read_sysctl(reader, ["net.ipv4.tcp_rmem", "kernel.no_such"])
    assert found["net.ipv4.tcp_rmem"] == "4096 131072 6291456"
    assert isinstance(found["kernel.no_such"], Missing)


def test_this_machine_has_a_swappiness() -> None:
    found = read_sysctl(HostReader(), ["vm.swappiness"])["vm.swappiness"]
    assert not isinstance(found, Missing)
    assert 0 <= int(found) <= 200
