"""`python -m covey` is the command `covey`."""

import sys

from covey.cli.main import main

sys.exit(main())
