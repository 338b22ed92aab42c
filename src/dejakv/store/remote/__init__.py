"""Objects in a bucket, copies of them in front, and what machines of one bucket tell each other."""
