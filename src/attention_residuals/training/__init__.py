"""Training: from settings and text files to a run folder that `from_pretrained` loads."""
