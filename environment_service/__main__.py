"""`python -m environment_service --function FILE.py:CLASS`: serves an environment until SIGTERM."""

import sys

from environment_service.serve import main

if __name__ == "__main__":
    sys.exit(main())
