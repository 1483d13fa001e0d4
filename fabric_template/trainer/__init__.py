"""Trainer: what was written for Trainer finds its words here."""
