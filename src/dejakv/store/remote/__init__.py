"""Objects in a bucket, copies of them in front, and messages between the machines of a bucket."""
