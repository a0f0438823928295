// Package commandline parses and executes the command lines of Keelson's daemons. Each daemon is a
// tree of cobra commands. All daemons have the same syntax of flags and the same kinds of errors.
package commandline

import (
	"context"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// UsageError is an error about the arguments or the settings of a program.
type UsageError struct{ Err error }

func (e *UsageError) Error() string { return e.Err.Error() }

// Unwrap returns the wrapped error.
func (e *UsageError) Unwrap() error { return e.Err }

// Execute runs the subcommand of root that args select, and returns this command and its error. It
// prints no error. Long flag names may have a single dash (see NormalizeArguments).
func Execute(ctx context.Context, root *cobra.Command, args []string) (*cobra.Command, error) {
	root.SilenceErrors, root.SilenceUsage = true, true
	root.SetArgs(NormalizeArguments(root, args))
	return root.ExecuteContextC(ctx)
}

// MarkFlagErrors makes root and its subcommands wrap errors about flags in *UsageError.
func MarkFlagErrors(root *cobra.Command) {
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &UsageError{err} })
}

// NormalizeArguments returns args with two dashes in front of each long name of a flag of root or
// of its subcommands. Previous releases accepted long names with a single dash, and this form is
// valid for one more release. All other arguments are unchanged: values, short names of flags, and
// everything after "--".
func NormalizeArguments(root *cobra.Command, args []string) []string {
	declared := declaredFlags(root)
	out := append([]string{}, args...)
	for i := 0; i < len(out) && out[i] != "--"; i++ {
		if len(out[i]) < 2 || out[i][0] != '-' {
			continue
		}
		if !strings.HasPrefix(out[i], "--") && declared.isLongName(out[i][1:]) {
			out[i] = "-" + out[i]
		}
		if declared.takesNext(out[i]) {
			i++
		}
	}
	return out
}

// flagNames contains the long and the short names of the flags of a command and its subcommands.
// Each map value reports whether the flag requires a value.
type flagNames struct {
	long  map[string]bool
	short map[byte]bool
}

// declaredFlags returns the names of the flags of root and its subcommands, including the flags
// that cobra adds.
func declaredFlags(root *cobra.Command) flagNames {
	names := flagNames{long: map[string]bool{"help": false, "version": false}, short: map[byte]bool{}}
	add := func(f *pflag.Flag) {
		needsValue := f.NoOptDefVal == ""
		names.long[f.Name] = needsValue
		if f.Shorthand != "" {
			names.short[f.Shorthand[0]] = needsValue
		}
	}
	commands := []*cobra.Command{root}
	for len(commands) > 0 {
		c := commands[0]
		c.Flags().VisitAll(add)
		c.PersistentFlags().VisitAll(add)
		commands = slices.Concat(commands[1:], c.Commands())
	}
	return names
}

// isLongName reports whether argument, without its leading dash, is the long name of a flag. It
// returns false if the first letter is a short flag that requires a value. The rest is then that
// value, as in -ofile.
func (n flagNames) isLongName(argument string) bool {
	name, _, _ := strings.Cut(argument, "=")
	_, known := n.long[name]
	return known && len(name) > 1 && !n.short[name[0]]
}

// takesNext reports whether arg contains a flag that takes the next argument as its value. arg
// starts with a dash.
func (n flagNames) takesNext(arg string) bool {
	if name, isLong := strings.CutPrefix(arg, "--"); isLong {
		return n.long[name] // a name with "=" is not in the map
	}
	for i := 1; i < len(arg); i++ {
		if n.short[arg[i]] {
			return i == len(arg)-1
		}
	}
	return false
}
