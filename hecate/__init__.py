"""hecate."""
