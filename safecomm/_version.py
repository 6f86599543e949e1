"""The version, in a file that can be read without the package being imported."""

__version__ = "0.2.0.dev0"
