"""Links: one direction of one pair of ranks, over memory or WebSocket."""
