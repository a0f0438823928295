package kctl

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/internal/clusterid"
)

// ownVerbNames are the subcommands of kctl that return their errors, which Main prints. kubectl's
// commands print their own errors and exit.
var ownVerbNames = []string{"lab", "trace", "why", "net", "cluster", "version"}

// newGroup makes c a command that only has subcommands. Without arguments, c prints its help. An
// unknown subcommand is an error; cobra's default prints the help and exits with 0.
func newGroup(c *cobra.Command, commands ...*cobra.Command) *cobra.Command {
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

// withPreviousName changes the name of c to name, its name in the previous release, and hides it. A
// renamed command has such a second command for one release.
func withPreviousName(c *cobra.Command, name string) *cobra.Command {
	current := c.Name()
	c.Use = name + strings.TrimPrefix(c.Use, current)
	c.Example = strings.ReplaceAll(c.Example, " "+current, " "+name)
	c.Hidden = true
	return c
}

// previousFlagName adds a hidden flag called previous that sets the same value as the flag called
// name. previous is the name of that flag in the previous release, and stays valid for one release.
func previousFlagName(flags *pflag.FlagSet, name, previous string) {
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

// formError is the error for an argument with an invalid form. Its text names the valid forms.
type formError struct{ text string }

// Error returns the text of the error.
func (e *formError) Error() string { return e.text }

// explainArguments changes Keelson's own commands below c. Their errors about missing and
// unexpected arguments then contain the usage of the command.
func explainArguments(c *cobra.Command) {
	for _, sub := range c.Commands() {
		explainArguments(sub)
	}
	judge := c.Args
	if judge == nil || c.HasSubCommands() || !isOwnVerb(c) {
		return
	}
	c.Args = func(c *cobra.Command, args []string) error {
		err := judge(c, args)
		var form *formError
		if err == nil || errors.As(err, &form) {
			return err
		}
		usage := strings.TrimSpace(strings.TrimSuffix(c.UseLine(), "[flags]"))
		more := slices.Clone(args)
		for range 2 {
			if more = append(more, "x"); judge(c, more) == nil {
				return fmt.Errorf("missing argument: %s", usage)
			}
		}
		return fmt.Errorf("unexpected argument %q: %s", args[len(args)-1], usage)
	}
}

// commandErrorText returns the text that Main prints for error err of command c. It starts with the
// full name of c, or with "error:" for a command of kubectl.
func commandErrorText(c *cobra.Command, err error) string {
	text := strings.TrimRight(errorText(err), "\n")
	var abandoned *clusterid.AbandonedError
	if errors.As(err, &abandoned) {
		text = abandoned.Error()
	}
	text += untrustedCAHint(text)
	if c == nil || !isOwnVerb(c) {
		return "error: " + strings.TrimPrefix(text, "error: ")
	}
	return c.CommandPath() + ": " + strings.TrimPrefix(text, "lab: ")
}

// untrustedCAHint returns a text with the remedy if the error text is about an API certificate that
// is signed by an unknown CA. It returns "" for other errors.
func untrustedCAHint(text string) string {
	if !strings.Contains(text, "certificate signed by unknown authority") || strings.Contains(text, untrustedCAText) {
		return ""
	}
	return untrustedCAText
}

const untrustedCAText = "\nThe kubeconfig in use does not trust the CA of this API. Either the cluster's CA was rotated and 'kctl cluster renew'\n" +
	"was not run in time, or this is the API of another cluster. The replica that created the cluster keeps a valid\n" +
	"kubeconfig: admin.kubeconfig in its data directory."

func isOwnVerb(c *cobra.Command) bool {
	for ; c.HasParent(); c = c.Parent() {
		if !c.Parent().HasParent() {
			return slices.Contains(ownVerbNames, c.Name())
		}
	}
	return false
}

// completion is a cobra function that returns the shell completions of an argument. It must return
// within completionTimeout, because the user waits for it.
type completion = func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective)

const completionTimeout = 2 * time.Second

// completeArgument returns a completion for the first argument of a command. The candidates are the
// results of list.
func completeArgument(list func(context.Context) []string) completion {
	return func(_ *cobra.Command, args []string, begin string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return matchingWords(list, begin), cobra.ShellCompDirectiveNoFileComp
	}
}

// completeFlag registers a shell completion for the value of a flag of command c. The candidates
// are the results of list.
func completeFlag(c *cobra.Command, flag string, list func(context.Context) []string) {
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

// fixedList returns a function that returns list, for completeArgument and completeFlag.
func fixedList(list ...string) func(context.Context) []string {
	return func(context.Context) []string { return list }
}

// labHosts returns the names of the lab's hosts for shell completion. It returns nil if there is no
// lab.
func labHosts(context.Context) []string {
	l, err := lab.Open(nil)
	if err != nil {
		return nil
	}
	var out []string
	for _, h := range l.Config.Hosts {
		out = append(out, h.Name)
	}
	return out
}

// memberNames returns a function that returns the names of the control-plane replicas, for shell
// completion.
func memberNames(f cmdutil.Factory) func(context.Context) []string {
	return func(ctx context.Context) []string {
		var members []api.ClusterMember
		if callAPIContext(ctx, f, "GET", api.PathClusterMembers, nil, &members) != nil {
			return nil
		}
		var out []string
		for _, m := range members {
			out = append(out, m.Name)
		}
		return out
	}
}

// nodeNames returns a function that returns the names of the nodes in the form node/NAME, for shell
// completion.
func nodeNames(f cmdutil.Factory) func(context.Context) []string {
	return func(ctx context.Context) []string {
		cs, err := f.KubernetesClientSet()
		if err != nil {
			return nil
		}
		list, err := cs.CoreV1().Nodes().List(ctx, metav1.ListOptions{ResourceVersion: "0", Limit: 500})
		if err != nil {
			return nil
		}
		var out []string
		for _, n := range list.Items {
			out = append(out, "node/"+n.Name)
		}
		return out
	}
}
