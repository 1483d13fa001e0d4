"""The command line and the tools around a run. The loop imports none of them."""
