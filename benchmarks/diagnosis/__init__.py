"""Broken runs and sound ones, and what the diagnosis says of each (`python -m benchmarks.diagnosis`)."""
