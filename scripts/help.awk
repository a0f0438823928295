# Prints the targets of a Makefile with the texts after ##, below the headings after ##@, in two columns.
/^##@ / { printf "\n%s\n", substr($0, 5) }
/^[a-z][a-z0-9-]*:.*## / {
  name = $0
  sub(/:.*/, "", name)
  sub(/.*## /, "")
  printf "  %-15s %s\n", name, $0
}
