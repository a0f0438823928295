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
		Short: "Show the certificates and keys of replicas and nodes, and when they expire",
		Long: "Show the CAs that the replicas trust, the certificates of replicas and nodes, and when they\n" +
			"expire. Certificates are renewed automatically at RENEWS. CAs are not: rotate the CA of 'cluster'\n" +
			"with 'kctl cluster rotate cluster-ca', and the CA of 'replicas' with 'kctl cluster rotate\n" +
			"peers-ca'. During a rotation, the table shows which replica trusts which CA and which CA signs.\n" +
			"KEY is the first part of the SHA-256 digest of the public key.\n" +
			"\n" +
			"Only nodes that are connected are shown. For a node, 'agent' is its client certificate and\n" +
			"'serving' is the certificate of its HTTPS server. For an agent of an earlier release, only the\n" +
			"certificate with which it connected is shown.\n" +
			"\n" +
			"A second table shows the keys that do not expire, and the state of a key rotation.",
		Example: "  kctl cluster certs\n  kctl cluster certs --nodes\n  kctl cluster certs -o json",
		Args:    cobra.NoArgs,
	}
	output := outputFlag(c)
	nodes := c.Flags().Bool("nodes", false,
		"list every certificate of every node; by default, only the client certificate and the serving "+
			"certificate that expire first are listed")
	c.RunE = func(*cobra.Command, []string) error {
		var all api.ClusterCertificates
		if err := callAPI(f, "GET", api.PathClusterCertificates, nil, &all); err != nil {
			return err
		}
		if done, err := printJSON(streams.Out, *output, all); done {
			return err
		}
		if err := printCerts(streams.Out, all, *nodes, time.Now()); err != nil {
			return err
		}
		var keys api.ClusterKeys
		if err := callAPI(f, "GET", api.PathClusterKeys, nil, &keys); err != nil {
			if apierrors.IsNotFound(err) { // a control plane of an earlier release
				return nil
			}
			return err
		}
		fmt.Fprintln(streams.Out)
		return printKeys(streams.Out, keys)
	}
	return c
}

// printCerts writes a table of certificates to w: CAs with the replicas that trust them,
// certificates of replicas, and certificates of nodes. If nodes is false, it shows only one node
// certificate for each use: the first to expire. The remaining lifetimes in the table are relative
// to now.
func printCerts(w io.Writer, all api.ClusterCertificates, nodes bool, now time.Time) error {
	t := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
	fmt.Fprintln(t, "KIND\tUSE\tHOLDER\tKEY\tEXPIRES\tIN\tRENEWS")
	row := func(kind string, c api.ClusterCertificate, holder string) {
		renews := "-"
		if c.Renews != 0 {
			renews = time.Unix(c.Renews, 0).UTC().Format(time.DateOnly)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", kind, c.Use, holder, c.Key,
			time.Unix(c.Expires, 0).UTC().Format(time.DateOnly), formatTimeLeft(c, now), renews)
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
		i := slices.IndexFunc(authorities, func(h *held) bool {
			return h.c.Use == c.Use && h.c.Key == c.Key && h.c.Signs == c.Signs
		})
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
	slices.SortStableFunc(ofNodes, func(a, b api.ClusterCertificate) int {
		return int(min(1, max(-1, a.Expires-b.Expires)))
	})
	of := map[string]int{} // number of node certificates by use
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

// formatTimeLeft returns the time from now until certificate c expires. It is in whole days if at
// least 48 hours remain, and otherwise in hours and minutes. For an expired certificate it returns
// "ENDED".
func formatTimeLeft(c api.ClusterCertificate, now time.Time) string {
	switch d := time.Unix(c.Expires, 0).Sub(now); {
	case d <= 0:
		return "ENDED"
	case d < 48*time.Hour:
		return d.Truncate(time.Minute).String()
	default:
		return fmt.Sprintf("%d days", d/(24*time.Hour))
	}
}
