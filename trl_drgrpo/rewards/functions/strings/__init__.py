"""Rewards that read text and compute nothing: equal answers, choices, forms, JSON, lengths and repetition.

`matching` holds an answer against a column (text, number or letter); `formats` checks the form, JSON included, and has
TRL's three penalties under one kind of name.
"""
