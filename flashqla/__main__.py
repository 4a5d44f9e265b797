"""`python -m flashqla`: see `flashqla.cli`."""

import sys

from flashqla.cli import main

if __name__ == "__main__":
    sys.exit(main())
