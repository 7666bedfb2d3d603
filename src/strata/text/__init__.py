"""Text on both sides of a model: conversations to ids, ids to answers. ``pipeline.py`` is the door.

Holds tokenizer, chat templates, incremental decoding, stop strings and one parser per tool or reasoning format. Must
not know tensors, engines or HTTP.
"""
