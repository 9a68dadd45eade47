"""These tests need TRITON_INTERPRET=1 from the start of a process: tests/codegen/test_interpreted.py gives them one."""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
