package main

import (
	"flag"
	"log/slog"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"keelson.dev/keelson/cmd/internal/commandline"
	"keelson.dev/keelson/test/helptext"
)

var rewrite = flag.Bool("rewrite", false, "write the golden file")

// The help of the ingress proxy, word for word.
func TestHelp(t *testing.T) {
	got := helptext.CommandHelp(newCommand(slog.New(slog.DiscardHandler)), func(*cobra.Command) bool { return true })
	helptext.CompareGolden(t, "testdata/help.golden", got, *rewrite)
}

// The previous name of a renamed flag sets the same value, and the default stays the same. Flags
// with one dash are valid, as in previous releases.
func TestPreviousFlagNames(t *testing.T) {
	for arg, want := range map[string]time.Duration{"--linger=3s": 3 * time.Second,
		"--shutdown-delay-duration=4s": 4 * time.Second,
		"--access-log":                 5 * time.Second, "-linger=6s": 6 * time.Second,
		"-shutdown-delay-duration=7s": 7 * time.Second} {
		c := newCommand(slog.New(slog.DiscardHandler))
		o := &options{}
		f := pflag.NewFlagSet("keelson-entry", pflag.ContinueOnError)
		o.declareFlags(f)
		if err := f.Parse(commandline.NormalizeArguments(c, []string{arg})); err != nil || o.shutdownDelay != want {
			t.Errorf("%s: %v, %v, want %v", arg, o.shutdownDelay, err, want)
		}
	}
}

// What is missing or too much is reported before anything is started.
func TestErrorsAboutTheCommandLine(t *testing.T) {
	const needed = "exactly one of --ingress-class NAME and --gateway NAMESPACE/NAME is required, without arguments: " +
		"see 'keelson-entry --help'"
	for _, c := range []struct {
		args []string
		want string
	}{
		{nil, needed},
		{[]string{"--ingress-class=a", "--gateway=b/c"}, needed},
		{[]string{"-ingress-class", "a", "extra"}, needed},
		{[]string{"--gateway=b"}, needed},
		{[]string{"--gatway=b/c"}, "reading the flags: unknown flag: --gatway"},
		{[]string{"-ingress-class=a", "-trusted-proxies=x"}, `--trusted-proxies: netip.ParsePrefix("x"): no '/'`},
	} {
		_, err := commandline.Execute(t.Context(), newCommand(slog.New(slog.DiscardHandler)), c.args)
		if err == nil || err.Error() != c.want {
			t.Errorf("%q: %v, want %s", c.args, err, c.want)
		}
	}
}
