package commandline

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// values has the flags of a program that a test runs.
type values struct {
	server, output string
	pods           int
	verbose, old   bool
	ran            string
	args           []string
}

// newProgram returns a program with persistent flags, flags of one command, and short names.
func newProgram(v *values) *cobra.Command {
	run := func(c *cobra.Command, args []string) error {
		v.ran, v.args = c.Name(), args
		return nil
	}
	root := &cobra.Command{Use: "daemon", Version: "v1", RunE: run, Args: cobra.ArbitraryArgs}
	root.PersistentFlags().StringVar(&v.server, "server", "", "")
	root.PersistentFlags().BoolVar(&v.verbose, "verbose", false, "")
	check := &cobra.Command{Use: "check", RunE: run, Args: cobra.ArbitraryArgs}
	check.Flags().IntVar(&v.pods, "max-pods", 0, "")
	check.Flags().StringVarP(&v.output, "output", "o", "", "")
	check.Flags().BoolVarP(&v.old, "all", "a", false, "")
	root.AddCommand(check)
	return root
}

func TestNormalizeArguments(t *testing.T) {
	for args, want := range map[string]string{
		"":                                "",
		"-server a -verbose":              "--server a --verbose",
		"-server=a -verbose=false":        "--server=a --verbose=false",
		"--server -verbose -verbose":      "--server -verbose --verbose", // the first -verbose is a value
		"-server -server":                 "--server -server",
		"--server=-x -verbose":            "--server=-x --verbose",
		"-verbose check -max-pods=3":      "--verbose check --max-pods=3",
		"check -max-pods 3 -all":          "check --max-pods 3 --all",
		"check -o -verbose":               "check -o -verbose", // a value
		"check -ao -verbose -verbose":     "check -ao -verbose --verbose",
		"check -a -verbose":               "check -a --verbose",
		"check -ojson -o=json -o json -a": "check -ojson -o=json -o json -a",
		"check -output=json":              "check -output=json", // -o with the value utput=json, as pflag reads it
		"-help":                           "--help",
		"-h -v -version":                  "-h -v --version",
		"-unknown -s a -verbosely":        "-unknown -s a -verbosely",
		"-verbose -- -verbose":            "--verbose -- -verbose",
		"- -verbose":                      "- --verbose",
	} {
		given := strings.Fields(args)
		got := NormalizeArguments(newProgram(&values{}), given)
		if got == nil || strings.Join(got, " ") != want {
			t.Errorf("%q: %q, want %q", args, got, want)
		}
		if strings.Join(given, " ") != args {
			t.Errorf("%q: the arguments of the caller were changed to %q", args, given)
		}
	}
}

// Both forms of a flag have the same effect, before and after the name of a command.
func TestExecute(t *testing.T) {
	for _, args := range []string{
		"--server a --verbose check --max-pods 3 --output json --all",
		"-server a -verbose check -max-pods 3 -o json -all",
		"-server=a check -verbose=true -max-pods=3 -ojson -a",
		"check -server=a -verbose -max-pods=3 -o=json -a",
	} {
		var v values
		c, err := Execute(t.Context(), newProgram(&v), strings.Fields(args))
		if err != nil || c.Name() != "check" || v.ran != "check" || len(v.args) > 0 || v.server != "a" ||
			!v.verbose || v.pods != 3 ||
			v.output != "json" || !v.old {
			t.Errorf("%s: %v, %+v", args, err, v)
		}
	}
	var v values
	if _, err := Execute(t.Context(), newProgram(&v), nil); err != nil || v.ran != "daemon" || len(v.args) > 0 {
		t.Errorf("without arguments: %v, %+v", err, v)
	}
	if _, err := Execute(t.Context(), newProgram(&v), []string{"-verbose", "one", "--", "-server"}); err != nil ||
		!slices.Equal(v.args, []string{"one", "-server"}) {
		t.Errorf("arguments that are not flags: %v, %q", err, v.args)
	}
}

func TestFlagErrors(t *testing.T) {
	for args, want := range map[string]string{
		"-sever=a":          "unknown shorthand flag: 's' in -sever=a",
		"--sever=a":         "unknown flag: --sever",
		"check -max-pods=x": `invalid argument "x" for "--max-pods" flag`,
		"check --server":    "flag needs an argument: --server",
	} {
		root := newProgram(&values{})
		MarkFlagErrors(root)
		_, err := Execute(t.Context(), root, strings.Fields(args))
		var usage *UsageError
		if !errors.As(err, &usage) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", args, err, want)
		}
	}
}
