"""A reader of pipeline.host over testinfra's connection: the same facts, of a host far away."""

import shlex
from dataclasses import dataclass

from testinfra.host import Host

from pipeline.host.reader import Entry, Missing, Output, Room

# `timeout` would wait for a process that no signal ends (state D): this one is left behind.
_BOUNDED = """
export LC_ALL=C PATH="$PATH:/usr/sbin:/sbin"
folder="$(mktemp -d)"
(COMMAND >"$folder/out" 2>"$folder/err"; echo $? >"$folder/status") >/dev/null 2>&1 </dev/null &
for i in $(seq TENTHS); do
  if [ -s "$folder/status" ]; then break; fi
  sleep 0.1
done
status=124
if [ -s "$folder/status" ]; then status="$(cat "$folder/status")"; fi
cat "$folder/out"
cat "$folder/err" >&2
if [ "$status" != 124 ]; then
  rm -f -- "$folder/out" "$folder/err" "$folder/status" && rmdir -- "$folder"
fi
exit "$status"
"""


@dataclass(frozen=True)
class AfarReader:
    """Nothing of it raises for what is not there: that is a Missing."""

    host: Host

    def text(self, path: str) -> str | Missing:
        """The text of a file."""
        done = self.host.run("cat -- %s", path)
        return done.stdout if done.rc == 0 else Missing(done.stderr.strip())

    def names(self, folder: str) -> tuple[str, ...] | Missing:
        """What a folder holds, sorted."""
        done = self.host.run("ls -A -- %s", folder)
        names = tuple(sorted(done.stdout.splitlines()))
        return names if done.rc == 0 else Missing(done.stderr.strip())

    def entry(self, path: str) -> Entry | Missing:
        """Owner and mode, links followed."""
        done = self.host.run("stat --dereference --format '%%u %%g %%a %%F' -- %s", path)
        if done.rc != 0:
            return Missing(done.stderr.strip())
        uid, gid, mode, kind = done.stdout.strip().split(" ", 3)
        return Entry(int(uid), int(gid), int(mode, 8), kind == "directory")

    def room(self, path: str) -> Room | Missing:
        """Size of the file system that `path` lies on, live."""
        done = self.host.run("stat --file-system --format '%%S %%b %%a' -- %s", path)
        if done.rc != 0:
            return Missing(done.stderr.strip())
        block, blocks, free = map(int, done.stdout.split())
        return Room(block * blocks, block * free)

    def command(self, *arguments: str, seconds: float = 10.0) -> Output | Missing:
        """Runs a command. Missing when there is no such command, or no answer in time."""
        script = _BOUNDED.replace("TENTHS", str(round(seconds * 10)))
        done = self.host.run(script.replace("COMMAND", shlex.join(arguments)))
        if done.rc == 124:
            return Missing(f"{arguments[0]} did not answer in {seconds:g} s", hung=True)
        if done.rc == 127:
            return Missing(f"{arguments[0]}: {done.stderr.strip() or 'no such command'}")
        return Output(done.rc, done.stdout, done.stderr)
