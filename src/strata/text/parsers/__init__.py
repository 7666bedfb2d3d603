"""Parsers of an answer's format, one file each: text in pieces of any size in, events out.

Every parser gives the same joined result however its text is cut, and never loses text: what does not fit its format
is said as it stands.
"""
