"""The command line. Heavy imports wait for a command that needs them, so that help is quick."""

from hecate.cli.app import app, main

__all__ = ["app", "main"]
