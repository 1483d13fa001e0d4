"""Exact: a pass over data, and a batch, that go on in their middle."""
