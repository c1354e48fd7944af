"""A volunteer's supervisor without worker and screen: enters `Admission` as `tt join` does, and tells what happens.

    python member.py RUN.toml [--send-token] [--poll SECONDS]

One JSON object a line: said, admitted, refused (exit code 2), failed (1). It leaves when standard input closes.
"""

from __future__ import annotations

import json
import sys
import threading

from tt_cli.auth import pass_renewer
from tt_cli.auth.peer_admission import admission
from tt_cli.errors import TTError
from tt_cli.run import folders, load_run


def say(kind: str, **what: object) -> None:
    print(json.dumps({"kind": kind, **what}), flush=True)


def tell(line: str, level: str) -> None:
    say("said", words=line, level=level)


def main() -> int:
    flags = sys.argv[2:]
    if "--poll" in flags:
        at = flags.index("--poll")
        pass_renewer.POLL_SECONDS = float(flags.pop(at + 1))
        pass_renewer.FIRST_WAITS = (0.1, 0.1)
    over = threading.Event()

    def follow() -> None:
        sys.stdin.read()
        over.set()

    try:
        run = load_run(sys.argv[1])
        with admission(run, "trainer", tell, send_token="--send-token" in flags) as admitted:
            text = folders.run_folder(run) / "trainer.pass"
            say("admitted", user=admitted.user, text=text.read_text().strip() if text.exists() else "")
            admitted.attach(over.set)
            threading.Thread(target=follow, daemon=True).start()
            over.wait()
            admitted.check()
    except TTError as error:
        say("refused" if error.exit_code == 2 else "failed", words=str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
