package kctl

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
)

// Name prefix and type of the Secrets in kube-system that store join tokens. Package
// controlplane/pki writes them. Such a Secret contains a hash of the token and not the token
// itself.
const (
	tokenSecrets     = "bootstrap-token-" // followed by the ID of the token
	tokenSecretsType = "keelson.dev/join-token"
)

// tokenRow describes a join token: a row of 'kctl cluster token list', and an item of its JSON
// output.
type tokenRow struct {
	ID      string   `json:"id"`
	Role    string   `json:"role"`
	Used    string   `json:"used"`
	Uses    string   `json:"uses"`
	Names   []string `json:"names,omitempty"` // empty if any name can join
	Replace bool     `json:"replace,omitempty"`
	Expires string   `json:"expires"`
	Expired bool     `json:"expired"`
	Joined  []string `json:"joined,omitempty"`
	Note    string   `json:"description,omitempty"`
}

// newTokenRow returns the row for s, the Secret of a join token. The token counts as expired if its
// expiry is before now. Missing fields stay empty: only the control plane validates tokens.
func newTokenRow(s *v1.Secret, now time.Time) tokenRow {
	text := func(key string) string { return string(s.Data[key]) }
	r := tokenRow{ID: strings.TrimPrefix(s.Name, tokenSecrets), Used: text("used"), Uses: text("uses"),
		Replace: text("replace") == "true",
		Expires: text("expiration"), Note: text("description")}
	for _, role := range []string{"node", "controlplane"} {
		if text("usage-"+role) == "true" {
			r.Role = role
		}
	}
	at, err := time.Parse(time.RFC3339, r.Expires)
	r.Expired = err != nil || !now.Before(at)
	if names := text("names"); names != "" {
		r.Names = strings.Split(names, ",")
	}
	for line := range strings.Lines(text("used-by")) {
		name, _, _ := strings.Cut(strings.TrimSpace(line), "/")
		r.Joined = append(r.Joined, name)
	}
	return r
}

func tokenListCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var output *string
	c := &cobra.Command{
		Use:   "list",
		Short: "List the join tokens, their remaining uses, and the nodes and replicas that used them",
		Long: "List the join tokens, their remaining uses, and the nodes and replicas that joined with them. The\n" +
			"token itself is printed only when it is created: the cluster stores a hash.",
		Example: "  kctl cluster token list\n  kctl cluster token list -o json",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			cs, err := f.KubernetesClientSet()
			if err != nil {
				return err
			}
			rows := []tokenRow{}
			for o := (metav1.ListOptions{FieldSelector: "type=" + tokenSecretsType, Limit: listLimit}); ; {
				page, err := cs.CoreV1().Secrets(metav1.NamespaceSystem).List(context.Background(), o)
				if err != nil {
					return err
				}
				for i := range page.Items {
					rows = append(rows, newTokenRow(&page.Items[i], time.Now()))
				}
				if o.Continue = page.Continue; o.Continue == "" {
					break
				}
			}
			if done, err := printJSON(streams.Out, *output, rows); done {
				return err
			}
			return printTokens(streams.Out, rows)
		},
	}
	output = outputFlag(c)
	return c
}

// printTokens writes a table of join tokens to w: valid tokens before expired ones, each sorted by
// expiry.
func printTokens(w io.Writer, rows []tokenRow) error {
	if len(rows) == 0 {
		_, err := fmt.Fprintln(w, "there are no join tokens: 'kctl cluster token create' makes one")
		return err
	}
	slices.SortFunc(rows, func(a, b tokenRow) int {
		if a.Expired != b.Expired {
			if b.Expired {
				return -1
			}
			return 1
		}
		return strings.Compare(a.Expires+a.ID, b.Expires+b.ID)
	})
	t := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
	fmt.Fprintln(t, "ID\tROLE\tUSED\tEXPIRES\tNAMES\tJOINED\tDESCRIPTION")
	dash := func(s string) string {
		if s == "" {
			return "-"
		}
		return s
	}
	for _, r := range rows {
		names := strings.Join(r.Names, ",")
		if names == "" {
			names = "any"
		}
		if r.Replace {
			names += " (also Nodes that exist)"
		}
		expires := dash(r.Expires)
		if r.Expired {
			expires += " (expired)"
		}
		fmt.Fprintf(t, "%s\t%s\t%s of %s\t%s\t%s\t%s\t%s\n", r.ID, dash(r.Role), dash(r.Used), dash(r.Uses),
			expires, names,
			dash(joinLast(r.Joined)), dash(r.Note))
	}
	return t.Flush()
}

// joinLast returns a text with the last five names and the number of names before them.
func joinLast(names []string) string {
	const shown = 5
	if len(names) <= shown {
		return strings.Join(names, ",")
	}
	return fmt.Sprintf("%s, and %d before", strings.Join(names[len(names)-shown:], ","), len(names)-shown)
}

func tokenDeleteCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	return &cobra.Command{
		Use:   "delete ID...",
		Short: "Delete join tokens; nodes and replicas that joined with them stay",
		Long: "Delete join tokens, given by their ID or as a whole token. No node or replica can join with a\n" +
			"deleted token. Nodes and replicas that joined with it stay. To remove them, see\n" +
			"'kctl cluster revoke' for nodes and 'kctl cluster member remove' for replicas.",
		Example: "  kctl cluster token delete prv72v",
		Args:    cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			cs, err := f.KubernetesClientSet()
			if err != nil {
				return err
			}
			secrets := cs.CoreV1().Secrets(metav1.NamespaceSystem)
			ids := make([]string, len(args))
			for i, arg := range args { // check that all tokens exist before one is deleted
				if ids[i], err = tokenID(arg, i+1); err != nil {
					return err
				}
				s, err := secrets.Get(context.Background(), tokenSecrets+ids[i], metav1.GetOptions{})
				if apierrors.IsNotFound(err) || err == nil && s.Type != tokenSecretsType {
					return fmt.Errorf("join token %q does not exist: 'kctl cluster token list' lists the join tokens",
						ids[i])
				} else if err != nil {
					return err
				}
			}
			for _, id := range ids {
				if err := secrets.Delete(context.Background(), tokenSecrets+id, metav1.DeleteOptions{}); err != nil &&
					!apierrors.IsNotFound(err) {
					return err
				}
				fmt.Fprintf(streams.Out, "token %s is deleted: nobody joins with it any more\n", id)
			}
			return nil
		},
	}
}

// tokenID returns the ID of a join token. arg is the ID or the whole token. Errors do not contain
// arg, because it may be a secret: they contain position, the position of arg on the command line.
func tokenID(arg string, position int) (string, error) {
	id := arg
	if strings.Contains(arg, ".") { // a whole token: keelson1.ROLE.ID.SECRET.PIN
		parts := strings.Split(arg, ".")
		if len(parts) != 5 || parts[0] != "keelson1" {
			return "", fmt.Errorf("argument %d is not a join token: want the ID of a token, as printed by "+
				"'kctl cluster token list', or the whole token", position)
		}
		id = parts[2]
	}
	if id == "" || len(id) > 32 || strings.ContainsFunc(id, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9')
	}) {
		return "", fmt.Errorf("argument %d is not the ID of a join token: want lower-case letters and digits, as "+
			"printed by 'kctl cluster token list'", position)
	}
	return id, nil
}
