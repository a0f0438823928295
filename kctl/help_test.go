package kctl

import (
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"keelson.dev/keelson/kctl/provision"
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
	got := helptext.CommandHelp(root, ownVerbs)
	helptext.CompareGolden(t, "testdata/help.golden",
		strings.ReplaceAll(got, "(default "+provision.BinDir(), "(default /usr/local/bin"), *rewrite)
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

// Each renamed command and flag accepts its previous name, which the help does not list.
func TestPreviousNames(t *testing.T) {
	root := Command([]string{"kctl"})
	find := func(line string) *cobra.Command {
		t.Helper()
		c, rest, err := root.Find(strings.Fields(line))
		if err != nil || len(rest) > 0 {
			t.Fatalf("kctl %s: %v, %q", line, err, rest)
		}
		return c
	}
	for previous, line := range map[string]string{
		"cluster step-down":     "cluster transfer-leader",
		"cluster restore-drill": "cluster restore-test",
		"lab heal":              "lab restore",
	} {
		was, is := find(previous), find(line)
		if was == is || !was.Hidden || is.Hidden || was.Short != is.Short ||
			was.Flags().FlagUsages() != is.Flags().FlagUsages() {
			t.Errorf("kctl %s is not a hidden second kctl %s", previous, line)
		}
	}
	for _, c := range []struct{ line, previous, flag, value string }{
		{"cluster rotate", "dismiss", "clear-removed", "cp3"},
		{"cluster rotate", "keep", "grace-period", "2h"},
		{"cluster up", "merge", "merge-kubeconfig", "true"},
		{"cluster add", "merge", "merge-kubeconfig", "true"},
		{"cluster upgrade", "patience", "health-timeout", "3m0s"},
		{"lab upgrade", "patience", "health-timeout", "3m0s"},
	} {
		flags := find(c.line).Flags()
		if err := flags.Parse([]string{"--" + c.previous + "=" + c.value}); err != nil {
			t.Errorf("kctl %s --%s: %v", c.line, c.previous, err)
		}
		was, is := flags.Lookup(c.previous), flags.Lookup(c.flag)
		if is == nil || is.Hidden || is.Value.String() != c.value || !was.Hidden {
			t.Errorf("kctl %s --%s does not set --%s", c.line, c.previous, c.flag)
		}
	}
}

// The texts of all errors that kctl makes itself, by file.
func TestErrorTexts(t *testing.T) {
	helptext.CompareGolden(t, "testdata/errors.golden", helptext.ErrorTexts(t, "."), *rewrite)
}
