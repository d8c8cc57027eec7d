"""The part that works before any venv exists: standard library only, Python 3.9 and newer."""
