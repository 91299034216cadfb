"""Calibration: one pass over unlabelled inputs, second-order statistics at named sites."""
