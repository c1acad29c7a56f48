"""Pipeline stages whose hops carry the partial sum and the block sums that the receiver lacks."""
