"""Looking inside: record the depth weights, sum them up, draw them, write the report."""
