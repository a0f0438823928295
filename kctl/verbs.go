package kctl

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/clusterid"
	"keelson.dev/keelson/kctl/verb"
)

// ownVerbNames are the subcommands of kctl that return their errors, which Main prints. kubectl's
// commands print their own errors and exit.
var ownVerbNames = []string{"lab", "trace", "why", "net", "cluster", "version"}

// explainArguments changes the argument check of Keelson's own commands below c, so that errors
// about missing and unexpected arguments contain the usage of the command.
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
		var form *verb.FormError
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

const untrustedCAText = "\nThe kubeconfig in use does not trust the CA of this API. Either the cluster's CA was " +
	"rotated and 'kctl cluster renew'\n" +
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
