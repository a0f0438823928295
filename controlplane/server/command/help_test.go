package command

import (
	"os"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"keelson.dev/keelson/test/helptext"
)

// The help of every verb, word for word.
func TestHelpTexts(t *testing.T) {
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	got := helptext.Cobra(New("v1"), func(*cobra.Command) bool { return true })
	got = strings.ReplaceAll(got, "--name string (default "+host+")", "--name string (default HOSTNAME)")
	helptext.Golden(t, "testdata/help.golden", got, *rewrite)
}

// The texts of all errors that the command line makes itself, by file.
func TestErrorTexts(t *testing.T) {
	helptext.Golden(t, "testdata/errors.golden", helptext.Errors(t, "."), *rewrite)
}
