"""Comparing policies on real models and texts: what each costs in quality and saves in time and bytes."""
