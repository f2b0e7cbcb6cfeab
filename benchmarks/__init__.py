"""One short script per question; every one prints a Markdown table and what it was measured on."""
