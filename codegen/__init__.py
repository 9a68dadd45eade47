"""How rewritten nodes become code."""
