"""Task files for lm-evaluation-harness whose data lies in a folder at hand instead of on the hub."""
