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
	"keelson.dev/keelson/kctl/provision"
	"keelson.dev/keelson/kctl/verb"
)

func clusterCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	c := &cobra.Command{
		Use:   "cluster",
		Short: "Manage a cluster: its machines, control-plane replicas, store, backups, keys and join tokens",
		Long: "Manage a cluster: its machines, control-plane replicas, store, backups, keys and join tokens.\n" +
			"\n" +
			"Commands for the machines of a cluster file, which kctl reaches by ssh:\n" +
			"  up, add, remove, reset, upgrade\n" +
			"\n" +
			"Commands for a running cluster, which kctl reaches through its API:\n" +
			"  status, certs, rotate, renew, revoke, transfer-leader, member, backup, restore-test,\n" +
			"  support-bundle, compact, token\n" +
			"\n" +
			"Commands for the replica on this machine, whose daemon must be stopped:\n" +
			"  init, join, restore, recover, rebuild, convert-log, keys, peer-ca, inspect\n" +
			"\n" +
			"The last group requires keelson-controlplane beside kctl, and runs its command of the same name.",
		Example: "  kctl cluster up -f cluster.yaml\n" +
			"  kctl cluster status\n" +
			"  kctl cluster backup /backups/today\n" +
			"  kctl cluster token create --role node",
	}
	c.AddCommand(provision.UpCommand(streams), provision.UpgradeCommand(streams), provision.AddCommand(streams),
		provision.RemoveCommand(streams), provision.ResetCommand(streams))
	verb.NewGroup(c, statusCommand(f, streams), certsCommand(f, streams), rotateCommand(f, streams),
		renewCommand(f, streams), transferLeaderCommand(f, streams),
		verb.WithPreviousName(transferLeaderCommand(f, streams), "step-down"), memberCommand(f, streams),
		backupCommand(f, streams), restoreTestCommand(f, streams),
		verb.WithPreviousName(restoreTestCommand(f, streams), "restore-drill"), supportCommand(f, streams),
		compactCommand(f, streams), tokenCommand(f, streams), revokeCommand(f, streams))
	for _, v := range [][3]string{
		{"init", "Create a cluster, with its first replica on this machine",
			"init --advertise-address 192.0.2.11 --cluster-name prod"},
		{"join", "Join this machine to a cluster as a control-plane replica",
			"join --advertise-address 192.0.2.12 --token-file /root/token --server 192.0.2.11"},
		{"restore", "Restore the store of this machine's replica from a backup", "restore /backups/today --replace"},
		{"recover", "Recover a cluster that has lost its quorum, with this replica alone (unsafe)", "recover"},
		{"rebuild", "Rebuild the data of this machine's replica from the other replicas",
			"rebuild --server 192.0.2.12"},
		{"convert-log", "Convert the log of this machine's replica to another format", "convert-log --to wal"},
		{"keys", "Manage the key file that encrypts the store on disk", "keys list /etc/keelson/keys"},
		{"peer-ca", "Manage the CA of the connections between replicas", "peer-ca list"},
		{"inspect", "Inspect the data directory of this machine's replica", "inspect"},
	} {
		c.AddCommand(daemonVerb(v[0], v[1], v[2]))
	}
	return c
}

// daemonProgram returns the path of the program keelson-controlplane in the directory that contains
// kctl.
func daemonProgram() string { return filepath.Join(provision.BinDir(), "keelson-controlplane") }

// daemonVerb returns a subcommand of 'kctl cluster' that runs the command of keelson-controlplane
// with the same name. That command works on the disk of this machine. usage is the name of the
// subcommand and its arguments. parents are the command names between 'kctl cluster' and that name,
// such as "backup".
func daemonVerb(usage, short, example string, parents ...string) *cobra.Command {
	name, _, _ := strings.Cut(usage, " ")
	path := slices.Concat(parents, []string{name})
	return &cobra.Command{
		Use: usage, Short: short, DisableFlagParsing: true,
		Example: "  " + daemonAsKctl + " " + example,
		RunE: func(_ *cobra.Command, args []string) error {
			return execDaemonVerb(append(slices.Clone(path), args...))
		},
	}
}

// daemonAsKctl is the argv[0] with which kctl starts keelson-controlplane. The help and the errors
// of keelson-controlplane therefore show 'kctl cluster' as the name of the program.
const daemonAsKctl = "kctl cluster"

// execDaemonVerb replaces the kctl process with keelson-controlplane and its arguments args. It
// returns only if the program is missing or cannot be started.
func execDaemonVerb(args []string) error {
	program := daemonProgram()
	if _, err := os.Stat(program); err != nil {
		return fmt.Errorf("'cluster %s' runs on a control-plane machine only: %w: install keelson-controlplane beside "+
			"kctl", args[0], err)
	}
	return syscall.Exec(program, append([]string{daemonAsKctl}, args...), os.Environ())
}

func tokenCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var q api.ClusterToken
	create := &cobra.Command{
		Use:   "create",
		Short: "Create a token with which nodes or replicas join",
		Long: "Create a token with which nodes or replicas join, and print it. A token can be used once, or once\n" +
			"per name if --names is given, unless --uses is set.\n" +
			"\n" +
			"A machine that joins cannot take the name of an existing Node, unless the token was created with\n" +
			"that name in --names and with --replace.",
		Example: "  # Allow 20 nodes to join\n" +
			"  kctl cluster token create --uses 20\n" +
			"\n" +
			"  # Allow the nodes w1 and w2 to join\n" +
			"  kctl cluster token create --names w1,w2\n" +
			"\n" +
			"  # Allow a new machine to take the name of the existing Node w1\n" +
			"  kctl cluster token create --names w1 --replace\n" +
			"\n" +
			"  # Allow a control-plane replica to join\n" +
			"  kctl cluster token create --role controlplane",
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			var answer api.ClusterTokenResult
			if err := callAPI(f, "POST", api.PathClusterTokens, q, &answer); err != nil {
				return err
			}
			fmt.Fprintln(streams.Out, answer.Token)
			return nil
		},
	}
	create.Flags().StringVar(&q.Role, "role", "node", "what can join with the token: node or controlplane")
	create.Flags().StringVar(&q.TTL, "ttl", "", "how long the token is valid (default 24h for nodes, 1h for replicas)")
	create.Flags().IntVar(&q.Uses, "uses", 0,
		"how many nodes or replicas can join with the token (default 1, or 1 per name)")
	create.Flags().StringSliceVar(&q.Names, "names", nil,
		"names of the nodes or replicas that can join with the token (default any)")
	create.Flags().BoolVar(&q.Replace, "replace", false,
		"allow the nodes in --names to take the names of existing Nodes")
	c := &cobra.Command{Use: "token", Short: "Manage join tokens",
		Example: "  kctl cluster token create --role node\n" +
			"  kctl cluster token list\n  kctl cluster token delete prv72v"}
	verb.CompleteFlag(create, "role", verb.FixedList("node", "controlplane"))
	return verb.NewGroup(c, create, tokenListCommand(f, streams), tokenDeleteCommand(f, streams))
}

// callAPI sends a request to a path of the API server that is not a Kubernetes resource. It encodes
// body as JSON unless it is nil, and decodes the JSON response into answer.
func callAPI(f cmdutil.Factory, method, path string, body, answer any) error {
	return callAPIContext(context.Background(), f, method, path, body, answer)
}

func callAPIContext(ctx context.Context, f cmdutil.Factory, method, path string, body, answer any) error {
	cs, err := f.KubernetesClientSet()
	if err != nil {
		return err
	}
	r := cs.RESTClient().Verb(method).RequestURI(path)
	if body != nil {
		raw, err := json.Marshal(body)
		if err != nil {
			return err
		}
		r = r.Body(raw).SetHeader("Content-Type", "application/json")
	}
	result := r.Do(ctx)
	if err := result.Error(); err != nil { // not wrapped: it is the API server's message
		return err
	}
	raw, err := result.Raw()
	if err != nil {
		return err
	}
	if err := json.Unmarshal(raw, answer); err != nil {
		return fmt.Errorf("%s %s: unexpected response: %w", method, path, err)
	}
	return nil
}

// callAndPrint sends a request as callAPI does, and decodes the response into result. It then
// prints result with printTable, or as JSON if output is "json".
func callAndPrint[T any](
	f cmdutil.Factory, streams genericiooptions.IOStreams, output, method, path string, body any, result *T,
	printTable func(io.Writer, T) error,
) error {
	if err := callAPI(f, method, path, body, result); err != nil {
		return err
	}
	if done, err := printJSON(streams.Out, output, *result); done {
		return err
	}
	return printTable(streams.Out, *result)
}

// formatTimestamp formats ms, a time in milliseconds since 1970, in RFC 3339 and UTC.
func formatTimestamp(ms int64) string { return time.UnixMilli(ms).UTC().Format(time.RFC3339) }

// outputFlag adds the flag -o, --output to command c, and returns a pointer to its value. The value
// is empty for text and "json" for JSON.
func outputFlag(c *cobra.Command) *string {
	o := ""
	c.Flags().StringVarP(&o, "output", "o", "", "output format: json prints the result as JSON; empty prints text")
	return &o
}

// printJSON writes v as JSON to w if output is "json". If output is empty, it writes nothing and
// done is false; the caller then prints text. For any other output it returns an error.
func printJSON(w io.Writer, output string, v any) (done bool, err error) {
	switch output {
	case "":
		return false, nil
	case "json":
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		return true, enc.Encode(v)
	}
	return true, fmt.Errorf("unknown output format -o %s: want json, or leave -o out for text", output)
}
