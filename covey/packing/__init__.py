"""Packing of ragged groups on the host into rows on the device."""
