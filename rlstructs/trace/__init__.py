"""Where the time goes: what trainer and workers do at each moment, a file of it, and what follows from it."""
