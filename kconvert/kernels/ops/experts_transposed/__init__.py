"""A mixture's experts with their weights stored as `[experts, inputs, outputs]`."""
