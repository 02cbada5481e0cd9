"""Kernel parameters, live."""

from collections.abc import Iterable, Mapping

from pipeline.host.reader import Missing, Reader


def read_sysctl(reader: Reader, names: Iterable[str]) -> Mapping[str, str | Missing]:
    """The value of each name from /proc/sys, blanks made one."""
    return {name: _value(reader.text(path_of(name))) for name in names}


def path_of(name: str) -> str:
    """`vm.swappiness` is /proc/sys/vm/swappiness; a slash in a name is a dot of the file's."""
    return "/proc/sys/" + name.translate(str.maketrans("./", "/."))


def _value(text: str | Missing) -> str | Missing:
    return text if isinstance(text, Missing) else " ".join(text.split())
