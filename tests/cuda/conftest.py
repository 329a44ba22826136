"""All of it needs the CUDA builds of torch and SGLang: `make test` does not collect it, `make check-cuda` does."""

import os

collect_ignore_glob = [] if os.environ.get("TANDEM_CUDA_CHECK") == "1" else ["test_*.py"]
