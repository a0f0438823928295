package command

import (
	"os"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"keelson.dev/keelson/test/helptext"
)

// The help text of every verb.
func TestHelpTexts(t *testing.T) {
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	got := helptext.CommandHelp(New("v1"), func(*cobra.Command) bool { return true })
	got = strings.ReplaceAll(got, "--name string (default "+host+")", "--name string (default HOSTNAME)")
	helptext.CompareGolden(t, "testdata/help.golden", got, *rewrite)
}

// Each renamed verb accepts its previous name, which the help does not list.
func TestPreviousNames(t *testing.T) {
	root := New("v1")
	for previous, line := range map[string]string{
		"peer-ca make":   "peer-ca create",
		"peer-ca forget": "peer-ca prune",
		"add-family":     "add-address-family",
	} {
		was, rest, err := root.Find(strings.Fields(previous))
		is, rest2, err2 := root.Find(strings.Fields(line))
		if err != nil || err2 != nil || len(rest)+len(rest2) > 0 {
			t.Fatalf("%s: %v %v", previous, err, err2)
		}
		if was == is || !was.Hidden || is.Hidden || was.Short != is.Short ||
			was.Flags().FlagUsages() != is.Flags().FlagUsages() {
			t.Errorf("%s is not a hidden alias of %s", previous, line)
		}
	}
	dir := initDataDir(t)
	for _, args := range [][]string{{"make", dir + "/authority"}, {"trust", dir + "/authority"},
		{"use", dir + "/authority"}, {"forget"}} {
		if _, err := runCommandLine(append([]string{"peer-ca", "--data-dir=" + dir}, args...)...); err != nil {
			t.Errorf("peer-ca %v: %v", args, err)
		}
	}
}

// The texts of all errors in this package, by file.
func TestErrorTexts(t *testing.T) {
	helptext.CompareGolden(t, "testdata/errors.golden", helptext.ErrorTexts(t, "."), *rewrite)
}
