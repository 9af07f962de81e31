"""What the commands and the benchmark share: errors, tables, files to write, devices."""
