"""What may go wrong in a long run, done on purpose: kills, cut links, thousands of steps."""
