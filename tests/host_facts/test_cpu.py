from collections.abc import Callable

from pipeline.host.cpu import read_governors
from pipeline.host.reader import Missing, Reader


def test_each_core_with_a_governor_is_told(recorded: Callable[..., Reader]) -> None:
    cpus = "/sys/devices/system/cpu"
    files = {
        f"{cpus}/cpu0/cpufreq/scaling_governor": "performance\n",
        f"{cpus}/cpu11/cpufreq/scaling_governor": "powersave\n",
        f"{cpus}/cpu12/online": "0\n",
        f"{cpus}/cpufreq/policy0/scaling_governor": "powersave\n",
        f"{cpus}/cpuidle/current_driver": "none\n",
    }
    assert read_governors(recorded(files)) == {"cpu0": "performance", "cpu11": "powersave"}


def test_a_virtual_machine_has_none(recorded: Callable[..., Reader]) -> None:
    found = read_governors(recorded({"/sys/devices/system/cpu/cpu0/online": "1"}))
    assert isinstance(found, Missing)
    assert "virtual machine" in found.reason
