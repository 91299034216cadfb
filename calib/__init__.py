"""Calibration: one pass over unlabelled images, second-order statistics at named sites."""
