"""What each subcommand of ``spikemark`` does; ``spikemark.runner`` parses the command line and calls one of them."""
