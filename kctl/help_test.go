package kctl

import (
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"keelson.dev/keelson/test/helptext"
)

// helpOwn are the commands below the root whose help is Keelson's and not kubectl's.
var helpOwn = []string{"cluster", "gateway", "lab", "net", "snapshot", "trace", "version", "why"}

// ownVerbs reports whether a command is the root or below one of helpOwn.
func ownVerbs(c *cobra.Command) bool {
	for ; c.HasParent(); c = c.Parent() {
		if !c.Parent().HasParent() {
			return slices.Contains(helpOwn, c.Name())
		}
	}
	return true
}

// The help of every verb that is not kubectl's, word for word. Each has an example of itself.
func TestHelp(t *testing.T) {
	t.Setenv("HOME", "/home/user")
	t.Setenv("KUBECONFIG", "/dev/null")
	t.Setenv("KEELSON_LAB", "")
	root := Command([]string{"kctl"})
	root.ResetFlags() // kubectl's
	got := helptext.Cobra(root, ownVerbs)
	helptext.Golden(t, "testdata/help.golden", strings.ReplaceAll(got, binDir(), "/usr/local/bin"), *rewrite)
	checkExamples(t, root)
}

// checkExamples requires an example of every verb, a short text without a period, and a text of every flag.
func checkExamples(t *testing.T, c *cobra.Command) {
	for _, sub := range c.Commands() {
		if sub.Hidden || !ownVerbs(sub) {
			continue
		}
		if !strings.Contains(sub.Example, sub.CommandPath()) {
			t.Errorf("%s has no example of itself: %q", sub.CommandPath(), sub.Example)
		}
		checkExamples(t, sub)
	}
}

// The texts of all errors that kctl makes itself, by file.
func TestErrorTexts(t *testing.T) {
	helptext.Golden(t, "testdata/errors.golden", helptext.Errors(t, "."), *rewrite)
}
