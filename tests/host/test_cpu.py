"""How the processor trades speed for power."""

import pytest
from testinfra.host import Host

from pipeline.host.wanted import Wanted
from tests.host.refusal import by_role, refuse

pytestmark = pytest.mark.host_state


@pytest.mark.usefixtures("own_kernel")
def test_every_core_has_the_governor(host: Host, wanted: Wanted) -> None:
    if wanted.governor is None:
        pytest.skip("governor: not wanted")
    done = host.run("cat /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor")
    if done.rc != 0:
        pytest.skip("the kernel sets no frequency on this machine")
    if wrong := set(done.stdout.split()) - {wanted.governor}:
        refuse(
            "HOST-CPU-GOVERNOR",
            f"cores with {', '.join(sorted(wrong))}",
            wanted=f"{wanted.governor} on all",
            next_step=by_role("tuning"),
        )
