"""The schedule, on the host: requests, what each step computes for them, and what a step's results mean."""
