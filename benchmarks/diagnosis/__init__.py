"""Broken runs and sound ones, and the verdicts of the diagnosis on each (`python -m benchmarks.diagnosis`)."""
