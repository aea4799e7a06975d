"""The file beside a draft that names the tokens of its head, for drafts that guess only some tokens.

Ascending int32 tokens in numpy's format. A program that does not know the file reads the folder as an ordinary model.
"""

HEAD_TOKENS = "head_tokens.npy"
