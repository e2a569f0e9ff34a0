"""What measures: simulations, studies, reports and pass rates. Only the command line imports it."""
