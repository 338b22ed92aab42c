"""Copied text: runs of tokens that stand in stored prompts, at whatever place, found by fingerprints and verified.

fingerprints  which places of a text are indexed (winnowing)
index         fingerprint -> where it stands, for one space
candidates    places that may begin a run: fingerprints joined along a diagonal
verify        tokens compared one by one: runs in their full length
cover         the runs that cover a prompt from as few donors as it takes
spaces        an index for each partition and epoch
"""
