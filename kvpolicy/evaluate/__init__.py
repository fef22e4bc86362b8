"""Comparing policies on real models and texts: what each costs in quality, and what it saves in time and bytes."""
