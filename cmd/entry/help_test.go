package main

import (
	"flag"
	"testing"

	"keelson.dev/keelson/test/helptext"
)

var rewrite = flag.Bool("rewrite", false, "write the golden file")

// The help of the ingress proxy, word for word.
func TestHelp(t *testing.T) {
	f := flag.NewFlagSet("keelson-entry", flag.ContinueOnError)
	proxyFlags(f)
	helptext.Golden(t, "testdata/help.golden", usageText+helptext.Flags(f), *rewrite)
}
