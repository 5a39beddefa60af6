"""Ragged groups on the host become rows on the device."""
