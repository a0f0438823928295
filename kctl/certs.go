package kctl

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"

	"keelson.dev/keelson/controlplane/api"
)

func certsCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	c := &cobra.Command{
		Use:   "certs",
		Short: "Show the certificates of replicas and nodes, and when they end",
		Long: "Show the authorities that the replicas believe, the certificates of replicas and nodes, and when they end. Certificates\n" +
			"renew themselves at RENEWS. An authority does not: that of 'cluster' is exchanged by 'kctl cluster rotate cluster-ca', that\n" +
			"of 'replicas' by 'kctl cluster rotate peers-ca', and while that goes on, this shows which replica believes which and which signs. Below stand the keys that have no end, and\n" +
			"how far the exchange of one is. KEY is the beginning of the SHA-256 of the\n" +
			"public key. Of the nodes only those are known that are connected: 'agent' is what a node shows to replicas, 'serving' what\n" +
			"its own HTTPS server shows. Of an agent of an earlier release the certificate is shown with which it connected.",
		Example: "  kctl cluster certs\n  kctl cluster certs --nodes\n  kctl cluster certs -o json",
		Args:    cobra.NoArgs,
	}
	output := outputFlag(c)
	nodes := c.Flags().Bool("nodes", false, "list each node's certificates, not only the one of each use that ends first")
	c.RunE = func(*cobra.Command, []string) error {
		var all api.ClusterCertificates
		if err := ask(f, "GET", api.PathClusterCertificates, nil, &all); err != nil {
			return err
		}
		if done, err := printJSON(streams.Out, *output, all); done {
			return err
		}
		if err := printCerts(streams.Out, all, *nodes, time.Now()); err != nil {
			return err
		}
		var keys api.ClusterKeys
		if err := ask(f, "GET", api.PathClusterKeys, nil, &keys); err != nil {
			if apierrors.IsNotFound(err) { // an earlier release
				return nil
			}
			return err
		}
		fmt.Fprintln(streams.Out)
		return printKeys(streams.Out, keys)
	}
	return c
}

// printCerts writes a table: authorities, each with the replicas that have it, then replicas, then nodes.
func printCerts(w io.Writer, all api.ClusterCertificates, nodes bool, now time.Time) error {
	t := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
	fmt.Fprintln(t, "KIND\tUSE\tHOLDER\tKEY\tEXPIRES\tIN\tRENEWS")
	row := func(kind string, c api.ClusterCertificate, holder string) {
		renews := "-"
		if c.Renews != 0 {
			renews = time.Unix(c.Renews, 0).UTC().Format(time.DateOnly)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", kind, c.Use, holder, c.Key, time.Unix(c.Expires, 0).UTC().Format(time.DateOnly), left(c, now), renews)
	}
	type held struct {
		c       api.ClusterCertificate
		holders []string
	}
	var authorities []*held
	var ofNodes []api.ClusterCertificate
	for _, c := range all.Certificates {
		if c.Node {
			ofNodes = append(ofNodes, c)
		}
		if !c.Authority {
			continue
		}
		i := slices.IndexFunc(authorities, func(h *held) bool { return h.c.Use == c.Use && h.c.Key == c.Key && h.c.Signs == c.Signs })
		if i < 0 {
			authorities = append(authorities, &held{c, []string{c.Holder}})
			continue
		}
		authorities[i].holders = append(authorities[i].holders, c.Holder)
	}
	for _, h := range authorities {
		kind := "authority"
		if !h.c.Signs {
			kind = "believed"
		}
		row(kind, h.c, strings.Join(h.holders, ","))
	}
	for _, c := range all.Certificates {
		if !c.Authority && !c.Node {
			row("certificate", c, c.Holder)
		}
	}
	slices.SortStableFunc(ofNodes, func(a, b api.ClusterCertificate) int { return int(min(1, max(-1, a.Expires-b.Expires))) })
	of := map[string]int{} // by use
	for _, c := range ofNodes {
		of[c.Use]++
	}
	shown := map[string]bool{}
	for _, c := range ofNodes {
		switch more := of[c.Use] - 1; {
		case nodes || !shown[c.Use] && more == 0:
			row("node", c, c.Holder)
		case !shown[c.Use]:
			row("node", c, fmt.Sprintf("%s, and %d later", c.Holder, more))
		}
		shown[c.Use] = true
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(all.Silent)) {
		fmt.Fprintf(w, "%s did not say what it has: %s\n", name, all.Silent[name])
	}
	return nil
}

// left is how long a certificate is good for, in days where it is days.
func left(c api.ClusterCertificate, now time.Time) string {
	switch d := time.Unix(c.Expires, 0).Sub(now); {
	case d <= 0:
		return "ENDED"
	case d < 48*time.Hour:
		return d.Truncate(time.Minute).String()
	default:
		return fmt.Sprintf("%d days", d/(24*time.Hour))
	}
}
