"""Sub-commands of `fo-compiler`, one a module."""
