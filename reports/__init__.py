"""What a person reads: tables, figures, HTML, comparison of runs. Reads run folders; imports no torch."""
