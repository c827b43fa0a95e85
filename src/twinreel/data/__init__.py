"""The data path: rows of a manifest to batches of frames and captions."""
