"""Models and programs that several tests train."""
