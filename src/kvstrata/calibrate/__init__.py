"""Numbers that a policy needs and a model's own text decides."""
