"""What is made of results: comparisons, tables of all recorded runs, pictures and the page of a sweep."""
