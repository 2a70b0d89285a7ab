"""Turns a plan into something that runs."""
