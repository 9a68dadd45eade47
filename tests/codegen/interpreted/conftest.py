"""These tests need TRITON_INTERPRET=1 from the start of a process: tests/codegen/test_interpreted.py gives them one."""

import os
from typing import Any

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
else:
    from triton.runtime import interpreter  # type: ignore[import-untyped]

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        """Triton 3.6 makes a number of an array of one element by int(), which numpy 2.4 refuses."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index
