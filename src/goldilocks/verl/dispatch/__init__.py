"""Requests go to workers and servers, and events come back."""
