"""Programs a person runs, and the helpers they share."""
