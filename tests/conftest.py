"""Settings of every test."""

from __future__ import annotations

from hypothesis import settings

# derandomized: a run in CI repeats on any desk
settings.register_profile("repository", deadline=None, max_examples=60, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=2000)
settings.load_profile("repository")
