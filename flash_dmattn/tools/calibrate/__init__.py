"""What `python -m flash_dmattn calibrate` does: checks, timings, the table, the profile."""
