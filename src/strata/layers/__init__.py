"""Layers: norm, rotary positions, attention and its sparse index, gated delta net, hyper-connections, n-gram
embedding, experts.

Lives between ``models`` (which builds layers from weights and orders them) and ``kernels`` (whose operations do all
arithmetic). A layer holds borrowed weights, takes rows and the part of a state that is its own, and must not know
model names, tiers or backends.
"""
