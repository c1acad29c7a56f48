"""From a model, a block setting and a layout to what they cost, before any run."""
