"""Run the command line: ``python -m trt_eagle3``."""

from __future__ import annotations

from trt_eagle3.program import main

if __name__ == "__main__":
    main()
