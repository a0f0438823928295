package main

import (
	"errors"
	"flag"
	"log/slog"
	"os"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"keelson.dev/keelson/cmd/internal/commandline"
	"keelson.dev/keelson/test/helptext"
)

var rewrite = flag.Bool("rewrite", false, "write the golden file")

// The help of the driver, word for word.
func TestHelp(t *testing.T) {
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	got := helptext.CommandHelp(newCommand(slog.New(slog.DiscardHandler)), func(*cobra.Command) bool { return true })
	got = strings.ReplaceAll(got, "--node-id string (default "+host+")", "--node-id string (default HOSTNAME)")
	helptext.CompareGolden(t, "testdata/help.golden", got, *rewrite)
}

// An invalid command line is an error about usage, after which the program exits with 2.
func TestErrorsAboutTheCommandLine(t *testing.T) {
	const usageText = "usage: keelson-csi-local [--name NAME] [--root DIR] [--socket PATH] --node-id NAME"
	for args, want := range map[string]string{
		"--node-id=":        usageText,
		"-node-id=":         usageText,
		"-node-id w1 extra": usageText,
		"--nodeid=w1":       "unknown flag: --nodeid",
	} {
		var usage *commandline.UsageError
		_, err := commandline.Execute(t.Context(), newCommand(slog.New(slog.DiscardHandler)), strings.Fields(args))
		if !errors.As(err, &usage) || err.Error() != want {
			t.Errorf("%s: %v, want %s", args, err, want)
		}
	}
}
