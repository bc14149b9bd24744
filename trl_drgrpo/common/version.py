"""The version of this package. Every other place reads it from here."""

__version__ = "0.2.0.dev0"
