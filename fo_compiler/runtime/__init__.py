"""What runs in a step: the transfer ops that a rewritten graph calls, and the transports behind them."""
