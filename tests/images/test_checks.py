"""Each check finds the fault that an image derived from ours has for it, and nothing else."""

from collections.abc import Callable, Iterator

import pytest

from tests.images import checks
from tests.images.conftest import tag_of
from tests.images.running import docker, package_of, running
from tests.images.saved import SavedImage, certificates_in, read_image

pytestmark = pytest.mark.images

PACKAGES = "opt/cleanslate/lib/python3.11/site-packages"
CERTIFICATE = f"-----BEGIN CERTIFICATE-----\n{'MIIDfault' * 40}\n-----END CERTIFICATE-----\n"
FILES = {
    "ca.pem": CERTIFICATE,
    "key.pem": f"-----BEGIN {'PRIVATE'} KEY-----\n{'MIIEfault' * 40}\n",
    "pip.conf": "[global]\n",
    "sources": "https://somebody:password@packages.example/simple\n",
}
# The authority is hidden by a later layer, and in the image all the same.
DOCKERFILE = f"""
FROM {{base}}
USER root
COPY {" ".join(FILES)} /faults/
RUN cat /faults/ca.pem >>/{PACKAGES}/certifi/cacert.pem
RUN rm /faults/ca.pem
RUN cp /bin/true /usr/local/bin/gcc
RUN cp /bin/true /usr/local/bin/become && chmod 4755 /usr/local/bin/become
RUN echo "deb https://mirror.example" >/etc/apt/sources.list.d/0000sources.list
RUN echo "# changed" >>/{PACKAGES}/pipeline/faults.py
ENV HF_TOKEN=hf_fault
"""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The id of the derived image."""
    context = tmp_path_factory.mktemp("context")
    for name, text in FILES.items():
        (context / name).write_text(text)
    (context / "Dockerfile").write_text(DOCKERFILE.format(base=tag_of("trainer")))
    image = docker("build", "--quiet", "--network", "none", str(context))
    yield image
    docker("image", "rm", image)


@pytest.mark.parametrize(
    ("check", "found"),
    [
        (checks.foreign_files, ["faults/pip.conf", "etc/apt/sources.list.d/0000sources.list"]),
        (checks.secrets, ["faults/key.pem", "faults/sources"]),
        (checks.certificates, ["faults/ca.pem"]),
        (checks.setuid, ["usr/local/bin/become"]),
        (checks.compilers, ["usr/local/bin/gcc"]),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_file_that_must_not_be_there_is_found(
    faulty: str, check: Callable[[SavedImage], list[str]], found: list[str]
) -> None:
    assert check(read_image(faulty)) == found


def test_a_certificate_of_this_machine_is_found_among_those_of_a_package(faulty: str) -> None:
    extra = certificates_in(CERTIFICATE.encode())
    found = checks.certificates(read_image(faulty), extra=extra)
    assert found == ["faults/ca.pem", f"{PACKAGES}/certifi/cacert.pem"]


def test_root_is_found(faulty: str) -> None:
    assert checks.user(read_image(faulty).config) == ["user 'root'"]


def test_a_secret_in_the_environment_is_found_there_and_in_the_history(faulty: str) -> None:
    found = checks.told(read_image(faulty).config)
    assert len(found) == 2
    assert all("HF_TOKEN=hf_fault" in line for line in found)


def test_a_private_value_is_found_in_the_history(faulty: str) -> None:
    found = checks.told(read_image(faulty).config, private=["/usr/local/bin/become"])
    assert any("chmod 4755" in line for line in found)


def test_a_changed_file_of_the_package_is_found(faulty: str) -> None:
    with running(faulty) as host, running(tag_of("trainer")) as sound:
        [line] = checks.differences(package_of(host), package_of(sound))
    assert line.startswith("pipeline/faults.py: ")
