"""What a conversation keeps: keys and values by position, index keys, recurrent state; how rows are recorded, committed
and folded.

Lives below ``layers``, which reads and records through the protocols of ``parts``. It must not know model names or
the mathematics of a layer.
"""
