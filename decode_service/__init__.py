"""The decode service: owns the host pool, admits requests directly into HiSparse, decodes."""
