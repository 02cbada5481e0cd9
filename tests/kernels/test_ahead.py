"""Every kernel compiles for both generations without a GPU, within their shared memory."""

import pytest

from pipeline.kernels.cuda import ahead
from pipeline.kernels.cuda.blocks import BLACKWELL, HOPPER, Device, Launch

CASES = {
    f"sm_{device.capability}-{shape}-{module}": (device, shape, module)
    for device in (HOPPER, BLACKWELL)
    for shape in ahead.SHAPES
    for module in ahead.MODULES
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_and_fit_in_shared_memory(name: str) -> None:
    device, shape, module = CASES[name]
    compiled = [ahead.compile_launch(one, device) for one in ahead.launches(module, shape, device)]
    assert compiled
    assert {one.name: one.shared_bytes for one in compiled if
            one.shared_bytes > device.shared_bytes} == {}  # fmt: skip


@pytest.mark.parametrize("shape", ahead.SHAPES)
@pytest.mark.parametrize("device", [HOPPER, BLACKWELL], ids=lambda device: device.capability)
def test_no_two_launches_of_a_shape_share_a_name(shape: str, device: Device) -> None:
    names = [one.name for module in ahead.MODULES for one in ahead.launches(module, shape, device)]
    assert len(names) == len(set(names))


def kernels(launches: list[Launch]) -> set[str]:
    return {launch.kernel.fn.__name__ for launch in launches}


@pytest.mark.parametrize("module", ahead.MODULES)
def test_no_kernel_is_left_out(module: str) -> None:
    """A function that programs are launched of takes its place from the grid."""
    written = {
        name
        for name, value in vars(ahead.MODULES[module]).items()
        if hasattr(value, "arg_names") and "program_id" in value.src
    }
    assert kernels(ahead.launches(module, "kimi", HOPPER)) == written
