package main

import (
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"keelson.dev/keelson/test/helptext"
)

var rewrite = flag.Bool("rewrite", false, "write the golden file")

// The help of the agent, word for word.
func TestHelp(t *testing.T) {
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	got := helptext.CommandHelp(newCommand(), func(*cobra.Command) bool { return true })
	got = strings.ReplaceAll(got, "(default "+strings.ToLower(host)+")", "(default HOSTNAME)")
	helptext.CompareGolden(t, "testdata/help.golden", got, *rewrite)
}
