"""Attention kernels for accelerators; `models.span_attention` chooses among them."""
