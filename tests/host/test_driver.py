"""NVIDIA's driver and the packages that must not move under it."""

import pytest
from testinfra.host import Host

from pipeline.host.driver import read_module
from pipeline.host.gpus import GpuFacts
from pipeline.host.reader import Missing
from pipeline.host.wanted import Wanted
from tests.host.afar import AfarReader
from tests.host.refusal import by_role, refuse

pytestmark = pytest.mark.host_state


def test_the_loaded_driver_is_of_the_branch(wanted: Wanted, driver: GpuFacts) -> None:
    if wanted.driver is None:
        pytest.skip("driver: not wanted")
    if driver.driver is None:
        pytest.skip("nothing is known of the loaded driver")
    if int(driver.driver.partition(".")[0]) < wanted.driver.branch:
        refuse(
            "HOST-DRIVER-BRANCH",
            f"driver {driver.driver} is loaded",
            wanted=f"branch {wanted.driver.branch} or newer",
            next_step=by_role("nvidia_driver") + "; then reboot",
        )


@pytest.mark.usefixtures("cards")
def test_the_loaded_module_is_an_open_one(wanted: Wanted, reader: AfarReader) -> None:
    if wanted.driver is None:
        pytest.skip("driver: not wanted")
    module = read_module(reader)
    if isinstance(module, Missing):
        pytest.skip(f"nothing is known of the loaded module: {module.reason}")
    if not module.open:
        refuse(
            "HOST-DRIVER-BRANCH",
            f"proprietary modules {module.version} are loaded",
            wanted="open kernel modules: Blackwell knows no others",
            next_step=by_role("nvidia_driver") + "; then reboot",
        )


def test_a_package_is_the_wanted_one(host: Host, wanted: Wanted, package: str) -> None:
    version = wanted.packages[package]
    done = host.run("dpkg-query --show --showformat='${db:Status-Status} ${Version}' %s", package)
    status, _, found = done.stdout.partition(" ")
    if done.rc != 0 or status != "installed" or found != version:
        refuse(
            "HOST-DRIVER-HELD",
            f"{package} is {found if status == 'installed' else 'not installed'}",
            wanted=version,
            next_step=by_role(_role(wanted, package)),
        )


def test_a_package_is_held(host: Host, wanted: Wanted, package: str) -> None:
    done = host.run("dpkg-query --show --showformat='${db:Status-Want}' %s", package)
    if done.stdout != "hold":
        refuse(
            "HOST-DRIVER-HELD",
            f"{package} is not held ({done.stdout or 'not installed'})",
            wanted="held: an upgrade on its own breaks a running driver",
            next_step=by_role(_role(wanted, package)),
        )


def test_a_package_cannot_be_upgraded(host: Host, wanted: Wanted, package: str) -> None:
    """Pinned: apt's candidate is the wanted version even where its hold is taken off."""
    policy = host.run("LC_ALL=C apt-cache policy %s", package).stdout
    candidate = policy.partition("Candidate: ")[2].partition("\n")[0]
    if candidate != wanted.packages[package]:
        refuse(
            "HOST-DRIVER-HELD",
            f"apt would install {package} {candidate or '(none)'}",
            wanted=f"{wanted.packages[package]}, by a pin",
            next_step=by_role(_role(wanted, package)),
        )


def _role(wanted: Wanted, package: str) -> str:
    driver = wanted.driver.packages if wanted.driver else {}
    return "nvidia_driver" if package in driver else "container_runtime"
