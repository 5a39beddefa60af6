"""`python -m covey` is the command `covey`."""

import sys

from covey.cli import main

sys.exit(main())
