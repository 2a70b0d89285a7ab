"""What was planned, what ran, and why not."""
