"""HTTP for one engine on this PC: OpenAI's chat and plain completions, status, metrics. ``app.py`` is the door.

Knows requests, answers and JSON; sees the engine through ``served.py`` alone. Must not know tensors, tiers or models.
"""
