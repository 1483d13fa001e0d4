"""Core: how one trains; reads nothing of the rooms around it."""
