package main

import (
	"flag"
	"testing"
	"time"

	"keelson.dev/keelson/test/helptext"
)

var rewrite = flag.Bool("rewrite", false, "write the golden file")

// The help of the ingress proxy, word for word.
func TestHelp(t *testing.T) {
	f := flag.NewFlagSet("keelson-entry", flag.ContinueOnError)
	proxyFlags(f)
	helptext.Golden(t, "testdata/help.golden", usageText+helptext.Flags(f), *rewrite)
}

// The previous name of a renamed flag sets the same value, and the default stays the same.
func TestPreviousFlagNames(t *testing.T) {
	for name, want := range map[string]time.Duration{"--linger=3s": 3 * time.Second, "--shutdown-delay-duration=4s": 4 * time.Second,
		"--access-log": 5 * time.Second} {
		f := flag.NewFlagSet("keelson-entry", flag.ContinueOnError)
		o := proxyFlags(f)
		previousFlagNames(f, o)
		if err := f.Parse([]string{name}); err != nil || o.shutdownDelay != want {
			t.Errorf("%s: %v, %v, want %v", name, o.shutdownDelay, err, want)
		}
	}
}
