"""Compilation: threads that may compile at once, attention that never falls back, a cache with its own life."""
