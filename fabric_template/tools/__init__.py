"""Tools: what is typed beside a run; the loop imports nothing of it."""
