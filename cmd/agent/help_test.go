package main

import (
	"flag"
	"os"
	"strings"
	"testing"

	"keelson.dev/keelson/agent/node"
	"keelson.dev/keelson/test/helptext"
)

var rewrite = flag.Bool("rewrite", false, "write the golden file")

// The help of the agent, word for word.
func TestHelp(t *testing.T) {
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	fs := flag.NewFlagSet("keelson-agent", flag.ContinueOnError)
	node.Flags(fs)
	verboseFlag(fs)
	node.WithConfigFile(fs)
	got := usageText + strings.ReplaceAll(helptext.Flags(fs), "(default "+strings.ToLower(host)+")", "(default HOSTNAME)")
	helptext.Golden(t, "testdata/help.golden", got, *rewrite)
}
