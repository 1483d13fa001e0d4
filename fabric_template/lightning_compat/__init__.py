"""Provide the attributes and methods of Trainer that Lightning's modules and callbacks use."""
