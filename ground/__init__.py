"""What every room stands on: errors, files, records, numbers as people write them. Knows nothing of models."""
