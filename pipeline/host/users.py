"""The user that stages run as, and the folders that belong to it."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.host.reader import Entry, Missing, Reader

_ID = re.compile("[0-9]{1,10}")


@dataclass(frozen=True)
class User:
    """uid, and the names of all groups."""

    name: str
    uid: int
    groups: tuple[str, ...]


def read_user(reader: Reader, name: str) -> User | Missing | None:
    """By getent and id; None where there is no such user."""
    passwd = reader.command("getent", "passwd", name)
    if isinstance(passwd, Missing):
        return passwd
    if passwd.status == 2:  # getent: the key is in no source
        return None
    fields = passwd.text.strip().split(":")
    if passwd.status != 0 or len(fields) < 4 or not _ID.fullmatch(fields[2]):
        return Missing(f"getent passwd {name}: {passwd.last_error}")
    groups = reader.command("id", "-nG", name)
    if isinstance(groups, Missing):
        return groups
    return User(name, int(fields[2]), tuple(groups.text.split()))


def read_folders(reader: Reader, paths: Iterable[str]) -> Mapping[str, Entry | Missing]:
    """Owner and mode of each."""
    return {path: reader.entry(path) for path in paths}
