"""Whether logind wipes /dev/shm of a user at the end of the last session."""

from dataclasses import dataclass

from pipeline.host.reader import Missing, Reader

_FOLDERS = ("/usr/lib/systemd", "/run/systemd", "/etc/systemd")  # rising weight
_ON = ("1", "yes", "y", "true", "t", "on")


@dataclass(frozen=True)
class RemoveIpc:
    """configured: by the files, for the next start of logind; live: what it does now."""

    configured: bool
    live: bool | Missing


def read_remove_ipc(reader: Reader) -> RemoveIpc:
    """The files as systemd merges them, and the running logind."""
    said = reader.command(
        *("busctl", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1"),
        *("org.freedesktop.login1.Manager", "RemoveIPC"),
    )
    live: bool | Missing
    if isinstance(said, Missing):
        live = said
    elif said.status == 0 and said.text.split() in (["b", "true"], ["b", "false"]):
        live = said.text.split() == ["b", "true"]
    else:
        live = Missing(f"busctl: {said.last_error}")
    return RemoveIpc(remove_ipc_configured(_texts(reader)), live)


def remove_ipc_configured(texts: tuple[str, ...]) -> bool:
    """The last RemoveIPC= of section Login; without one systemd's default, yes."""
    value = "yes"
    for text in texts:
        section = ""
        for line in text.splitlines():
            stripped = line.strip()
            if stripped.startswith("["):
                section = stripped
            elif section == "[Login]" and stripped.replace(" ", "").startswith("RemoveIPC="):
                value = stripped.partition("=")[2].strip() or "yes"
    return value.lower() in _ON


def _texts(reader: Reader) -> tuple[str, ...]:
    """logind.conf, then its drop-ins by name; of one name, that of the weightiest folder."""
    drop_ins: dict[str, str] = {}
    main = ""
    for folder in _FOLDERS:
        text = reader.text(f"{folder}/logind.conf")
        main = main if isinstance(text, Missing) else text
        names = reader.names(f"{folder}/logind.conf.d")
        for name in () if isinstance(names, Missing) else names:
            if name.endswith(".conf"):
                one = reader.text(f"{folder}/logind.conf.d/{name}")
                drop_ins[name] = "" if isinstance(one, Missing) else one
    return (main, *(drop_ins[name] for name in sorted(drop_ins)))
