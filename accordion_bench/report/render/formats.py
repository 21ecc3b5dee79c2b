"""What tables, the page and figures can be written as."""

FORMATS = ("md", "csv", "latex", "html")
FIGURES = ("png", "pdf")
