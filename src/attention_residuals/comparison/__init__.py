"""From arms, seeds and sizes to trained models that differ in nothing else, and what they came to."""
