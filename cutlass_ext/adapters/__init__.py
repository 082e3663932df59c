"""Other projects' ways in: each module here is for one of them, imports it, and does nothing until asked to."""
