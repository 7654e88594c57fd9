"""`python -m kconvert`."""

import sys

from kconvert.cli import main

sys.exit(main())
