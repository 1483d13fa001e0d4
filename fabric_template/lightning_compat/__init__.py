"""Provide what Lightning's modules and callbacks expect from a Trainer."""
