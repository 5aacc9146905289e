"""Print the table of what goes with what, as Markdown: `... > docs/combinations.md`."""

from jpaged.combinations import as_markdown

if __name__ == "__main__":
    print(as_markdown(), end="")
