"""From a checkpoint folder to a converted one and back: copying, checking, the model card."""
