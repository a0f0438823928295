package kctl

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
)

// ClusterStatus is what GET /cluster/status answers.
type ClusterStatus struct {
	Cluster  string          `json:"cluster"`
	Answered string          `json:"answeredBy"`
	Leader   string          `json:"leader"`
	Term     uint64          `json:"term"`
	Revision uint64          `json:"revision"`
	Keys     int             `json:"keys"`
	Bytes    int64           `json:"bytes"`
	Members  []ClusterMember `json:"members"`
}

// ClusterMember is one replica.
type ClusterMember struct {
	Name    string `json:"name"`
	Address string `json:"address"`
	Voter   bool   `json:"voter"`
	Leader  bool   `json:"leader"`
	Ready   string `json:"ready"` // "yes" or why not
}

func clusterCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	c := &cobra.Command{
		Use:     "cluster",
		Short:   "Replicas of the control plane, join tokens",
		Example: "  kctl cluster status\n  kctl cluster token create --role node",
	}
	c.AddCommand(&cobra.Command{
		Use:     "status",
		Short:   "Show the replicas, the leader and the store",
		Example: "  kctl cluster status",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var s ClusterStatus
			if err := ask(f, "GET", "/cluster/status", nil, &s); err != nil {
				return err
			}
			fmt.Fprintf(streams.Out, "cluster %s: leader %s in term %d, revision %d, %d keys, %.1f MiB (answered by %s)\n\n",
				s.Cluster, s.Leader, s.Term, s.Revision, s.Keys, float64(s.Bytes)/(1<<20), s.Answered)
			t := tabwriter.NewWriter(streams.Out, 0, 8, 3, ' ', 0)
			fmt.Fprintln(t, "REPLICA\tADDRESS\tROLE\tREADY")
			for _, m := range s.Members {
				role := "learner"
				switch {
				case m.Leader:
					role = "leader"
				case m.Voter:
					role = "follower"
				}
				fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", m.Name, m.Address, role, m.Ready)
			}
			return t.Flush()
		},
	})
	c.AddCommand(tokenCommand(f, streams), daemonVerb("init", "Make a new cluster on this machine, its first replica"),
		daemonVerb("join", "Make this machine a further replica of a cluster"))
	return c
}

// daemonVerb hands a verb that works on this machine's disk to the daemon's own program.
func daemonVerb(name, short string) *cobra.Command {
	return &cobra.Command{
		Use: name, Short: short, DisableFlagParsing: true,
		Example: fmt.Sprintf("  kctl cluster %s --help", name),
		RunE: func(_ *cobra.Command, args []string) error {
			program := filepath.Join(binDir(), "keelson-controlplane")
			if _, err := os.Stat(program); err != nil {
				return fmt.Errorf("cluster %s works on a control-plane machine: %w: install keelson-controlplane beside kctl", name, err)
			}
			return syscall.Exec(program, append([]string{program, name}, args...), os.Environ())
		},
	}
}

func tokenCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	role, ttl := "node", "24h"
	create := &cobra.Command{
		Use:     "create",
		Short:   "Make a token with which a node or a replica joins",
		Example: "  kctl cluster token create\n  kctl cluster token create --role controlplane --ttl 1h",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			var answer struct {
				Token string `json:"token"`
			}
			if err := ask(f, "POST", "/cluster/tokens", map[string]string{"role": role, "ttl": ttl}, &answer); err != nil {
				return err
			}
			fmt.Fprintln(streams.Out, answer.Token)
			return nil
		},
	}
	create.Flags().StringVar(&role, "role", role, "node or controlplane")
	create.Flags().StringVar(&ttl, "ttl", ttl, "how long the token is good for")
	c := &cobra.Command{Use: "token", Short: "Join tokens", Example: create.Example}
	c.AddCommand(create)
	return c
}

// ask calls a path of the API that is not a resource.
func ask(f cmdutil.Factory, verb, path string, body, answer any) error {
	cs, err := f.KubernetesClientSet()
	if err != nil {
		return err
	}
	r := cs.RESTClient().Verb(verb).AbsPath(path)
	if body != nil {
		raw, err := json.Marshal(body)
		if err != nil {
			return err
		}
		r = r.Body(raw).SetHeader("Content-Type", "application/json")
	}
	raw, err := r.DoRaw(context.Background())
	if err != nil {
		return fmt.Errorf("%s %s: %w", verb, path, err)
	}
	if err := json.Unmarshal(raw, answer); err != nil {
		return fmt.Errorf("%s %s: unexpected answer: %w", verb, path, err)
	}
	return nil
}
