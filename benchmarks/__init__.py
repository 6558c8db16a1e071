"""Benchmarks of hecate."""
