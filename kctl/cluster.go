package kctl

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"

	"keelson.dev/keelson/controlplane/api"
)

func clusterCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	c := &cobra.Command{
		Use:   "cluster",
		Short: "Machines of a cluster, replicas of the control plane, its store, join tokens",
		Long: "Machines of a cluster, replicas of the control plane, its store, join tokens.\n\n" +
			"up, add, remove and reset are about the machines of a cluster file, and reach them by ssh. status, certs, rotate, renew,\n" +
			"step-down, member, backup, restore-drill, support-bundle, compact and token ask the API of a running cluster. The others\n" +
			"work on the disk of a control-plane machine, as 'keelson-controlplane' of the same name does, while its daemon is stopped.",
		Example: "  kctl cluster up -f cluster.yaml\n  kctl cluster status\n  kctl cluster backup /backups/today\n  kctl cluster token create --role node",
	}
	c.AddCommand(upCommand(streams), upgradeCommand(streams), addCommand(streams), removeCommand(streams), resetCommand(streams))
	group(c, statusCommand(f, streams), certsCommand(f, streams), rotateCommand(f, streams), renewCommand(f, streams), stepDownCommand(f, streams), memberCommand(f, streams),
		backupCommand(f, streams), restoreDrillCommand(f, streams), supportCommand(f, streams), compactCommand(f, streams), tokenCommand(f, streams), revokeCommand(f, streams))
	for _, v := range [][2]string{
		{"init", "Make a new cluster on this machine, its first replica"},
		{"join", "Make this machine a further replica of a cluster"},
		{"restore", "Make the store of this machine's replica from a backup"},
		{"recover", "Go on alone after the majority of the replicas was lost (unsafe)"},
		{"rebuild", "Let this machine's replica take its data from the others again"},
		{"convert-log", "Change the log store of this machine's replica"},
		{"keys", "Keys that encrypt the store on disk"},
		{"peer-ca", "The authority of the connections between replicas"},
		{"inspect", "Show what is in the data folder of this machine's replica"},
	} {
		c.AddCommand(daemonVerb(v[0], v[1]))
	}
	return c
}

// daemonProgram is the daemon's program beside kctl.
func daemonProgram() string { return filepath.Join(binDir(), "keelson-controlplane") }

// daemonVerb hands a verb that works on this machine's disk to the daemon's own program. below are the words in front of it.
func daemonVerb(name, short string, below ...string) *cobra.Command {
	path := slices.Concat(below, []string{name})
	return &cobra.Command{
		Use: name, Short: short, DisableFlagParsing: true,
		Example: fmt.Sprintf("  kctl cluster %s --help", strings.Join(path, " ")),
		RunE: func(_ *cobra.Command, args []string) error {
			return becomeDaemonVerb(append(slices.Clone(path), args...))
		},
	}
}

// daemonAsKctl is the name under which the daemon's program is called: its help and errors name kctl's verb by it.
const daemonAsKctl = "kctl cluster"

// becomeDaemonVerb replaces this process with the daemon's program.
func becomeDaemonVerb(args []string) error {
	program := daemonProgram()
	if _, err := os.Stat(program); err != nil {
		return fmt.Errorf("cluster %s works on a control-plane machine: %w: install keelson-controlplane beside kctl", args[0], err)
	}
	return syscall.Exec(program, append([]string{daemonAsKctl}, args...), os.Environ())
}

func tokenCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var q api.ClusterToken
	create := &cobra.Command{
		Use:   "create",
		Short: "Make a token with which a node or a replica joins",
		Long: "Make a token with which a node or a replica joins. It works once, or once per name, unless --uses says otherwise. A node\n" +
			"cannot take the name of a Node that exists, unless the token states the name and --replace.",
		Example: "  kctl cluster token create --uses 20\n  kctl cluster token create --names w1,w2\n" +
			"  kctl cluster token create --names w1 --replace\n  kctl cluster token create --role controlplane",
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			var answer api.ClusterTokenResult
			if err := ask(f, "POST", api.PathClusterTokens, q, &answer); err != nil {
				return err
			}
			fmt.Fprintln(streams.Out, answer.Token)
			return nil
		},
	}
	create.Flags().StringVar(&q.Role, "role", "node", "node or controlplane")
	create.Flags().StringVar(&q.TTL, "ttl", "", "how long the token is good for (default 24h for nodes, 1h for replicas)")
	create.Flags().IntVar(&q.Uses, "uses", 0, "how many may join with it (default 1, or one per name)")
	create.Flags().StringSliceVar(&q.Names, "names", nil, "names of those who may join with it (default: any)")
	create.Flags().BoolVar(&q.Replace, "replace", false, "let it take over Nodes of these names that exist")
	c := &cobra.Command{Use: "token", Short: "Join tokens", Example: create.Example + "\n  kctl cluster token list\n  kctl cluster token delete prv72v"}
	flagWords(create, "role", fixed("node", "controlplane"))
	return group(c, create, tokenListCommand(f, streams), tokenDeleteCommand(f, streams))
}

// ask calls a path of the API that is not a resource.
func ask(f cmdutil.Factory, verb, path string, body, answer any) error {
	return askWithin(context.Background(), f, verb, path, body, answer)
}

func askWithin(ctx context.Context, f cmdutil.Factory, verb, path string, body, answer any) error {
	cs, err := f.KubernetesClientSet()
	if err != nil {
		return err
	}
	r := cs.RESTClient().Verb(verb).RequestURI(path)
	if body != nil {
		raw, err := json.Marshal(body)
		if err != nil {
			return err
		}
		r = r.Body(raw).SetHeader("Content-Type", "application/json")
	}
	result := r.Do(ctx)
	if err := result.Error(); err != nil { // the server's own words
		return err
	}
	raw, err := result.Raw()
	if err != nil {
		return err
	}
	if err := json.Unmarshal(raw, answer); err != nil {
		return fmt.Errorf("%s %s: unexpected answer: %w", verb, path, err)
	}
	return nil
}

// show asks for something and prints it, as JSON where that is wanted.
func show[T any](f cmdutil.Factory, streams genericiooptions.IOStreams, output, verb, path string, body any, into *T, print func(io.Writer, T) error) error {
	if err := ask(f, verb, path, body, into); err != nil {
		return err
	}
	if done, err := printJSON(streams.Out, output, *into); done {
		return err
	}
	return print(streams.Out, *into)
}

// stamp is a time of the API, in milliseconds since 1970, for a person.
func stamp(ms int64) string { return time.UnixMilli(ms).UTC().Format(time.RFC3339) }

// outputFlag is -o json, for verbs that print a table otherwise.
func outputFlag(c *cobra.Command) *string {
	o := ""
	c.Flags().StringVarP(&o, "output", "o", "", "json prints what the API answers")
	return &o
}

// printJSON says whether the output is to be JSON, and writes it then.
func printJSON(w io.Writer, output string, v any) (done bool, err error) {
	switch output {
	case "":
		return false, nil
	case "json":
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		return true, enc.Encode(v)
	}
	return true, fmt.Errorf("-o %s: want json, or nothing for a table", output)
}
