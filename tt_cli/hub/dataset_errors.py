"""Errors of `datasets` as one line each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tt_cli.errors import TTError, UsageError, first_line
from tt_cli.hub.hub_files import hub_errors


@contextmanager
def dataset_errors(action: str, missing: str, damaged: type[TTError] = TTError) -> Iterator[None]:
    """As `hub_errors`, of what `datasets` raises while it opens a data set or reads one.

    missing: words for a data set that is not there. damaged: raised where it cannot be read.
    """
    import datasets.exceptions
    import pyarrow

    with hub_errors(action):
        try:  # within: some of these are OSErrors, which hub_errors takes for a full disk
            yield
        except datasets.exceptions.DatasetNotFoundError as error:
            raise UsageError(f"{action}: {missing} or run `tt login`") from error
        except datasets.exceptions.DatasetsError as error:
            raise damaged(f"{action}: {first_line(error)}") from error
        except (pyarrow.ArrowException, MemoryError) as error:
            raise damaged(f"{action}: a file of it cannot be read ({first_line(error)})") from error
