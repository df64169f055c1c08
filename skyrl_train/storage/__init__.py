"""Remote storage at URIs such as s3://bucket/folder: the mirror of a run, and data and models that a run reads."""
