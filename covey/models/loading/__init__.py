"""Loading of other projects' checkpoints into decoders."""
