"""Entry point of `python -m dlattn`."""

import sys

from dlattn.cli import main

sys.exit(main())
