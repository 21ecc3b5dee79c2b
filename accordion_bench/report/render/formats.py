"""What tables and the page can be written as."""

FORMATS = ("md", "csv", "latex", "html")
