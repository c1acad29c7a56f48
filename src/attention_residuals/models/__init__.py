"""Attention residuals inside Hugging Face models."""
