"""Model families whose layers are not attention alone: layer kinds with a state, and the families that have them."""
