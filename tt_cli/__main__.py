"""`python -m tt_cli`: the same as `tt`."""

import sys

from tt_cli.cli.main import main

sys.exit(main())
