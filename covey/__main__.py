"""Run the command `covey` for `python -m covey`."""

import sys

from covey.cli.main import main

sys.exit(main())
