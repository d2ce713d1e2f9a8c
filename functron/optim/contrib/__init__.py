"""Optimizers that fewer runs want: Adafactor, Adam-mini, Lion, SOAP."""
