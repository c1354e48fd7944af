"""A PostgreSQL server for tests: a real one, for one test module alone."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def postgres_server() -> Iterator[str]:
    """The URL of a database. The server refuses to be root, so root lends it to the user that Debian made for it."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    assert found, "install postgresql"
    folder = Path(f"/tmp/tt-postgres-{os.getpid()}")
    folder.mkdir(mode=0o700)
    owner = "postgres" if os.getuid() == 0 else pwd.getpwuid(os.getuid()).pw_name
    shutil.chown(folder, owner)

    def command(name: str, *arguments: str) -> list[str]:
        change = ["setpriv", f"--reuid={owner}", f"--regid={owner}", "--clear-groups"] if os.getuid() == 0 else []
        return [*change, str(found[-1] / name), *arguments]

    quiet = {"stdout": subprocess.DEVNULL, "cwd": folder}
    subprocess.run(command("initdb", "-D", f"{folder}/data", "-A", "trust", "-U", "tt", "-N"), check=True, **quiet)  # type: ignore[call-overload]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = f"-F -p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder}"
    control = ("-D", f"{folder}/data", "-w", "-l", f"{folder}/log")
    subprocess.run(command("pg_ctl", *control, "-o", options, "start"), check=True, **quiet)  # type: ignore[call-overload]
    yield f"postgresql://tt@127.0.0.1:{port}/postgres"
    subprocess.run(command("pg_ctl", *control, "-m", "immediate", "stop"), check=True, **quiet)  # type: ignore[call-overload]
    shutil.rmtree(folder)
