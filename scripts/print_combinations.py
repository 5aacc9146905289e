"""Print the table of which settings can be combined, as Markdown: `... > docs/combinations.md`."""

from jpaged.combinations import as_markdown

if __name__ == "__main__":
    print(as_markdown(), end="")
