"""Plans: what a run needs on a machine that need not be there, from its compiled programs."""
