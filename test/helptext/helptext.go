// Package helptext renders the texts that a program prints on a terminal. A golden file can then
// hold all of them, so that they can be edited as one text.
package helptext

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// CommandHelp returns the help texts of a cobra command and of the commands below it, in the order
// of their names. It omits hidden commands and flags. It also omits a command for which keep
// returns false, and the commands below it.
func CommandHelp(root *cobra.Command, keep func(*cobra.Command) bool) string {
	var b strings.Builder
	writeCommand(&b, root, keep)
	return b.String()
}

func writeCommand(b *strings.Builder, c *cobra.Command, keep func(*cobra.Command) bool) {
	if c.Hidden || !keep(c) {
		return
	}
	fmt.Fprintf(b, "=== %s\n", strings.TrimSuffix(c.UseLine(), " [flags]"))
	fmt.Fprintf(b, "short: %s\n", c.Short)
	if c.Long != "" {
		fmt.Fprintf(b, "\n%s\n", c.Long)
	}
	if c.Example != "" {
		fmt.Fprintf(b, "\nexamples:\n%s\n", c.Example)
	}
	var flags strings.Builder
	c.NonInheritedFlags().VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Name == "help" {
			return
		}
		name := "--" + f.Name
		if f.Shorthand != "" {
			name = "-" + f.Shorthand + ", " + name
		}
		writeFlag(&flags, name, f.Value.Type(), f.DefValue, f.Usage)
	})
	if flags.Len() > 0 {
		fmt.Fprintf(b, "\nflags:\n%s", flags.String())
	}
	b.WriteString("\n")
	for _, sub := range c.Commands() {
		writeCommand(b, sub, keep)
	}
}

func writeFlag(b *strings.Builder, name, kind, value, usage string) {
	b.WriteString(strings.TrimSuffix("  "+name+" "+kind, " "))
	if value != "" && value != "[]" && value != "false" && value != "0" && value != "0s" {
		fmt.Fprintf(b, " (default %s)", value)
	}
	fmt.Fprintf(b, "\n      %s\n", usage)
}

// CompareGolden fails the test if a text differs from the golden file at path. If rewrite is set,
// it first writes the text to the file.
func CompareGolden(t *testing.T, path, got string, rewrite bool) {
	t.Helper()
	if rewrite {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got == string(want) {
		return
	}
	is, was := strings.Split(got, "\n"), strings.Split(string(want), "\n")
	for i := range max(len(is), len(was)) {
		if i >= len(is) || i >= len(was) || is[i] != was[i] {
			t.Errorf("%s differs from line %d on (go test -rewrite writes the file):\n got %q\nwant %q",
				path, i+1, strings.Join(is[min(i, len(is)):min(i+3, len(is))], "\n"),
				strings.Join(was[min(i, len(was)):min(i+3, len(was))], "\n"))
			return
		}
	}
}
