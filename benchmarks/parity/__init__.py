"""This project's objective beside TRL and verl: same batch, same option, largest difference in value and gradient.

Both come from their wheels into an environment of their own (`make parity`) and are only called, never copied.
"""
