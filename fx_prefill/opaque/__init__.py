"""Modules that Dynamo does not look into: each is one eager break on the real rows."""
