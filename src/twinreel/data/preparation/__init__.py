"""What is done with a collection before anything is trained: check, pack, extract, prepare."""
