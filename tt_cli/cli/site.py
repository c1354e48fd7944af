"""`tt site export RUN OUT`: the run's web page as files, for any static host."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

EXAMPLES = """\
tt site export emoji site/
tt site export my-run.toml /srv/www/my-run        again and again, from cron: it replaces what it wrote before
tt site export org/run site/ --json

It shows what the aux peer on this machine has recorded up to now. The folder needs no server of its own: upload it,
under any path. --json prints {"folder", "step", "pictures", "files", "bytes"}."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the one action."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    words = "write the run's web page into a folder"
    export = actions.add_parser("export", help=words, description=f"{words.capitalize()}.", allow_abbrev=False)
    export.add_argument("run", metavar="RUN", help="built-in name, TOML file, or ORGANISATION/REPOSITORY")
    export.add_argument("out", metavar="OUT", type=Path, help="the folder: a new or empty one, or an earlier export")
    export.add_argument(
        "--database", default="", metavar="URL", help="of the aux peer's history, where it is not the run folder's file"
    )
    export.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Write it, and say what was written."""
    from tt_cli.auxiliary.history.reader import HistoryReader
    from tt_cli.auxiliary.history.writer import FILE, PICTURES, database_url
    from tt_cli.errors import TTError
    from tt_cli.memory.answer_tables import Tables
    from tt_cli.run import folders, load_run, name_for_others
    from tt_cli.web.queries import Answers
    from tt_cli.web.site_export import export

    config = load_run(args.run)
    folder = folders.run_folder(config)
    if not args.database and not (folder / FILE).is_file():
        raise TTError(f"this machine has recorded nothing of run {args.run}: `tt aux-peer {args.run}` does")
    reader = HistoryReader(database_url(folder, args.database))
    name = name_for_others(args.run, config)
    try:
        answers = Answers(reader, config, name, calculator=Tables(config, name))
        written = export(answers, folder / PICTURES, args.out)
    finally:
        reader.close()
    if args.json:
        print(json.dumps(dataclasses.asdict(written)))
    else:
        size = f"{written.bytes / 1e6:.1f} MB in {written.files} files"
        pictures = f"{written.pictures} picture{'' if written.pictures == 1 else 's'}"
        print(f"{written.folder}: step {written.step:,}, {pictures}, {size}")
    return 0
