"""FX graph in, FX graph out: sites -> regions -> rewrite -> order. One pass a module.

Importing this package is cheap: torch imports it while TORCH_LOGS is parsed.
"""
