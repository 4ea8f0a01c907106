"""Where the time goes.

What trainer and workers do at each moment, a file of it, and what follows from it.
"""
