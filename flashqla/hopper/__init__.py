"""TileLang kernels for NVIDIA Hopper (SM90). Imported by `flashqla.backends` on such a device only."""
