"""`python -m embedlog.pipeline` loads topics into Parquet."""

from __future__ import annotations

import sys

from embedlog.pipeline.command import main

if __name__ == "__main__":
    sys.exit(main())
