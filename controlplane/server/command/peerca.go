package command

import (
	"crypto/x509"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/server"
)

// peerCACommand returns the command 'peer-ca' with its subcommands, which rotate the CA of the
// connections between replicas. A running replica reloads the changed files, so it need not be
// stopped.
func peerCACommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "peer-ca",
		Short: "Manage the CA of the connections between replicas",
		Long: "Manage the CA of the connections between replicas, which initially is the cluster's CA. A removed\n" +
			"replica has a copy of that CA's key. If its machine is no longer trusted, create a new CA for the\n" +
			"other replicas. Running replicas reload the CA within seconds. The certificates that the CA signs\n" +
			"are renewed automatically.",
		Example: "  # Create a CA once, and copy the file to every replica\n" +
			"  keelson-controlplane peer-ca create FILE\n" +
			"\n" +
			"  # On every replica: trust the new CA\n" +
			"  keelson-controlplane peer-ca trust FILE\n" +
			"\n" +
			"  # When all replicas trust it, on every replica: use it\n" +
			"  keelson-controlplane peer-ca use FILE\n" +
			"\n" +
			"  # When all replicas use it, on every replica: stop trusting the previous CA\n" +
			"  keelson-controlplane peer-ca prune",
	}
	var cfg server.Config
	newVerb := func(use, short string, args cobra.PositionalArgs,
		do func(w io.Writer, args []string) error) *cobra.Command {
		v := &cobra.Command{
			Use: use, Short: short, Args: args,
			RunE: func(c *cobra.Command, args []string) error { return do(c.OutOrStdout(), args) },
		}
		v.Example = "  keelson-controlplane peer-ca " + use
		v.Flags().StringVar(&cfg.DataDir, "data-dir", defaultDataDir, "data directory of this replica")
		return v
	}
	verb := func(use, short string, args cobra.PositionalArgs, do func(w io.Writer, args []string) error,
		previousNames ...string) {
		c.AddCommand(newVerb(use, short, args, do))
		for _, name := range previousNames {
			c.AddCommand(withPreviousName(newVerb(use, short, args, do), name))
		}
	}
	verb("create FILE", "Create a CA for the connections between replicas, and write its certificate and key to FILE",
		cobra.ExactArgs(1), func(w io.Writer, args []string) error {
			cluster, err := recovery.LoadCluster(cfg.Dir())
			if err != nil {
				return err
			}
			cert, err := pki.MakePeerCA(args[0], cluster.Name, time.Now())
			if err == nil {
				fmt.Fprintf(w, "%s contains a new CA: %s\n", args[0], describeCertificate(cert))
			}
			return err
		}, "make")
	verb("trust FILE", "Trust a CA in addition to the current one", cobra.ExactArgs(1),
		func(w io.Writer, args []string) error {
			cert, err := pki.TrustPeerCA(recovery.TrustFolder(cfg.Dir()), args[0])
			if err == nil {
				fmt.Fprintf(w, "this replica now trusts %s, too\n", describeCertificate(cert))
			}
			return err
		})
	verb("use FILE", "Sign this replica's certificates with a CA", cobra.ExactArgs(1),
		func(w io.Writer, args []string) error {
			cert, err := pki.UsePeerCA(recovery.TrustFolder(cfg.Dir()), args[0])
			if err == nil {
				fmt.Fprintf(w, "%s signs this replica's certificates; the previous CA is still trusted\n",
					describeCertificate(cert))
			}
			return err
		})
	verb("prune", "Stop trusting all CAs except the current one", cobra.NoArgs, func(w io.Writer, _ []string) error {
		if err := pki.RemovePreviousPeerCAs(recovery.TrustFolder(cfg.Dir())); err != nil {
			return err
		}
		trust, err := pki.Load(recovery.TrustFolder(cfg.Dir()))
		if err == nil {
			fmt.Fprintf(w, "this replica trusts only %s\n", describeCertificate(trust.PeerAuthorities()[0]))
		}
		return err
	}, "forget")
	verb("list", "List the trusted CAs", cobra.NoArgs, func(w io.Writer, _ []string) error {
		trust, err := pki.Load(recovery.TrustFolder(cfg.Dir()))
		if err != nil {
			return err
		}
		t := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
		fmt.Fprintln(t, "AUTHORITY\tKEY\tEXPIRES\tUSE")
		for i, cert := range trust.PeerAuthorities() {
			use := "believed"
			if i == 0 {
				use = "signs"
			}
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", cert.Subject.CommonName, pki.SPKIHash(cert)[:16],
				cert.NotAfter.UTC().Format(time.DateOnly), use)
		}
		return t.Flush()
	})
	return c
}

func describeCertificate(c *x509.Certificate) string {
	return fmt.Sprintf("%s (key %s)", c.Subject.CommonName, pki.SPKIHash(c)[:16])
}
