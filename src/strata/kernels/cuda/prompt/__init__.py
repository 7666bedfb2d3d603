"""A prompt's chunks on a card: dense operations of torch, and kernels of our own for its routed experts.

It must not import the kernels or recorders of decode rounds.
"""
