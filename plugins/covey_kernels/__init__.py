"""Attention kernels for accelerators: within rows (`covey.attention`) and of a token decoded (`covey.decoding`)."""
