// Package verb helps to define the commands of kctl: groups of subcommands, previous names of
// commands and flags, shell completion, and signals.
package verb

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// NewGroup makes c a command that only has subcommands. Without arguments, c prints its help. An
// unknown subcommand is an error; cobra's default prints the help and exits with 0.
func NewGroup(c *cobra.Command, commands ...*cobra.Command) *cobra.Command {
	c.AddCommand(commands...)
	c.Args = func(c *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		return unknownCommand(c, args[0])
	}
	c.RunE = func(c *cobra.Command, _ []string) error { return c.Help() }
	return c
}

// WithPreviousName renames c to previous, its name in the previous release, hides it, and returns
// it. A renamed command has such a second, hidden command for one release.
func WithPreviousName(c *cobra.Command, previous string) *cobra.Command {
	current := c.Name()
	c.Use = previous + strings.TrimPrefix(c.Use, current)
	c.Example = strings.ReplaceAll(c.Example, " "+current, " "+previous)
	c.Hidden = true
	return c
}

// AddPreviousFlag adds a hidden flag that sets the same value as the flag with the given name.
// previous is the name of the hidden flag: the name in the previous release, which stays valid for
// one release.
func AddPreviousFlag(flags *pflag.FlagSet, name, previous string) {
	f := *flags.Lookup(name)
	f.Name, f.Shorthand, f.Hidden = previous, "", true
	flags.AddFlag(&f)
}

// unknownCommand returns the error for word, which is not a subcommand of c. It suggests similar
// subcommands, or the help.
func unknownCommand(c *cobra.Command, word string) error {
	if c.SuggestionsMinimumDistance <= 0 {
		c.SuggestionsMinimumDistance = 2
	}
	remedy := fmt.Sprintf("'%s --help' lists the commands", c.CommandPath())
	if near := c.SuggestionsFor(word); len(near) > 0 {
		remedy = "did you mean " + strings.Join(near, " or ") + "?"
	}
	return fmt.Errorf("unknown command %q: %s", word, remedy)
}

// FormError is the error for an argument with an invalid form. Its text names the valid forms.
type FormError struct{ text string }

// NewFormError returns the error for an argument with an invalid form. The text names the valid
// forms.
func NewFormError(text string) *FormError { return &FormError{text} }

// Error returns the text of the error.
func (e *FormError) Error() string { return e.text }

// completion is a cobra function that returns the shell completions of an argument. It must return
// within completionTimeout, because the user waits for it.
type completion = func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective)

const completionTimeout = 2 * time.Second

// CompleteArgument returns a completion for the first argument of a command. The candidates are the
// results of list.
func CompleteArgument(list func(context.Context) []string) completion {
	return func(_ *cobra.Command, args []string, begin string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return matchingWords(list, begin), cobra.ShellCompDirectiveNoFileComp
	}
}

// CompleteFlag registers a shell completion for the value of a flag of command c. The candidates
// are the results of list.
func CompleteFlag(c *cobra.Command, flag string, list func(context.Context) []string) {
	err := c.RegisterFlagCompletionFunc(flag, func(_ *cobra.Command, _ []string, begin string) ([]string,
		cobra.ShellCompDirective) {
		return matchingWords(list, begin), cobra.ShellCompDirectiveNoFileComp
	})
	if err != nil {
		panic(err) // the flag is not defined: a programming error
	}
}

func matchingWords(list func(context.Context) []string, begin string) []string {
	ctx, cancel := context.WithTimeout(context.Background(), completionTimeout)
	defer cancel()
	var out []string
	for _, w := range list(ctx) {
		if strings.HasPrefix(w, begin) {
			out = append(out, w)
		}
	}
	slices.Sort(out)
	return out
}

// FixedList returns a function that returns list, for CompleteArgument and CompleteFlag.
func FixedList(list ...string) func(context.Context) []string {
	return func(context.Context) []string { return list }
}
