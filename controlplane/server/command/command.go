// Package command is the command line of keelson-controlplane.
package command

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/resource"

	"keelson.dev/keelson/controlplane/server"
	"keelson.dev/keelson/internal/logtail"
	"keelson.dev/keelson/internal/memory"
)

// New returns the command tree.
func New(version string) *cobra.Command {
	root := &cobra.Command{
		Use:   "keelson-controlplane",
		Short: "One replica of a Keelson control plane",
		Long: "One replica of a Keelson control plane: a raft-replicated store, the Kubernetes API over it,\n" +
			"and, on the leader, controllers and scheduler.\n\n" +
			"What is no flag on the command line is asked of the environment, then of the file --config.",
		Example:       "  keelson-controlplane init --advertise-address 192.0.2.11\n  keelson-controlplane run",
		Version:       version,
		SilenceErrors: true, SilenceUsage: true,
	}
	root.AddCommand(initCommand(), joinCommand(), runCommand(version), checkCommand(version),
		restoreCommand(), verifyCommand(), recoverCommand(), rebuildCommand(), convertCommand(), group(backupCommand(version)), group(keysCommand()), group(peerCACommand()), inspectCommand(), addFamilyCommand())
	// The second line is what an upgrade goes by: no replica goes back below the level of what is stored.
	// It is no template's: one that is set by name brings every method of every type into the program.
	root.Version = fmt.Sprintf("%s\nfeature level %d", version, server.FeatureLevel)
	configured(root)
	return callAs(root, os.Args[0])
}

const defaultDataDir = "/var/lib/keelson/controlplane"

// identity adds the flags that every verb has.
func identity(c *cobra.Command, cfg *server.Config) {
	host, _ := os.Hostname()
	f := c.Flags()
	f.StringVar(&cfg.Name, "name", host, "name of this replica; it never changes")
	f.StringVar(&cfg.DataDir, "data-dir", defaultDataDir, "folder of this replica's data")
	f.StringVar(&cfg.Advertise, "advertise-address", "", "IP address under which users, agents and replicas reach this replica")
}

// mayKnow says of a verb that the data folder tells it the address.
func mayKnow(c *cobra.Command) {
	c.Flags().Lookup("advertise-address").Usage += " (default: the address that it had last, or with which 'init' or 'join' made the folder)"
}

func initCommand() *cobra.Command {
	var cfg server.Config
	var cluster server.Cluster
	var founding server.Founding
	var output string
	c := &cobra.Command{
		Use:     "init",
		Short:   "Make a new cluster: its keys, its configuration, the first join tokens",
		Example: "  keelson-controlplane init --advertise-address 192.0.2.11 --cluster-name prod",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			f, err := server.Init(cfg, cluster, founding)
			if err != nil {
				return err
			}
			if output == "json" {
				return json.NewEncoder(c.OutOrStdout()).Encode(f)
			}
			fmt.Fprintf(c.OutOrStdout(), "cluster made. Start this replica with 'keelson-controlplane run'.\n\n"+
				"kubeconfig of the administrator:  %s\nfurther replicas join with token: %s\nworkers join with token:          %s\n"+
				"(the first is good for %s within an hour, the second for %d within 24 hours; 'kctl cluster token create' makes others)\n",
				f.Kubeconfig, f.ControlPlaneToken, f.NodeToken, uses(founding.ReplicaTokenUses), founding.NodeTokenUses)
			if f.EncryptionKeys != "" {
				fmt.Fprintf(c.OutOrStdout(), "key file of the stores and backups: %s (keep a copy elsewhere: its loss is the loss of the data)\n", f.EncryptionKeys)
			}
			return nil
		},
	}
	identity(c, &cfg)
	f := c.Flags()
	f.StringVar(&cluster.Name, "cluster-name", "keelson", "name of the cluster")
	f.StringVar(&cluster.ClusterCIDR, "cluster-cidr", "10.244.0.0/16", "addresses of pods: a prefix, or one of IPv4 and one of IPv6 with a comma between, the first family in front")
	f.StringVar(&cluster.ServiceCIDR, "service-cidr", "10.96.0.0/16", "addresses of Services, of the same families in the same order")
	f.StringVar(&cluster.Domain, "cluster-domain", "cluster.local", "DNS domain of the cluster")
	f.IntVar(&founding.NodeTokenUses, "node-token-uses", 100, "how many workers may join with the token that is printed")
	f.IntVar(&founding.ReplicaTokenUses, "replica-token-uses", 1, "how many further replicas may join with the token that is printed")
	f.StringVar(&founding.KubeconfigServer, "kubeconfig-server", "", "the API's URL in the kubeconfig (default: this replica)")
	f.StringVar(&cfg.Store.Keys, "encryption-keys", "", "file of keys that encrypt the stores of all replicas, which the operator then hands to each of them; "+
		"'none' leaves them in clear (default: a new one in pki of the data folder, which joining replicas receive)")
	f.StringVarP(&output, "output", "o", "text", "text or json")
	return c
}

func uses(n int) string {
	if n == 1 {
		return "1 use"
	}
	return fmt.Sprintf("%d uses", n)
}

func joinCommand() *cobra.Command {
	var cfg server.Config
	var token, tokenFile string
	var servers []string
	c := &cobra.Command{
		Use:     "join",
		Short:   "Make this machine a further replica of a cluster",
		Example: "  keelson-controlplane join --advertise-address 192.0.2.12 --token keelson1.controlplane... --server 192.0.2.11",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if tokenFile != "" && token == "" {
				raw, err := os.ReadFile(tokenFile)
				if err != nil {
					return fmt.Errorf("--token-file: %w", err)
				}
				token = string(raw)
			}
			if token == "" || len(servers) == 0 {
				return fmt.Errorf("--token (or --token-file) and --server are needed: 'kctl cluster token create --role controlplane' makes a token")
			}
			if err := server.Join(c.Context(), cfg, strings.TrimSpace(token), servers); err != nil {
				return err
			}
			if tokenFile != "" {
				if err := os.Remove(tokenFile); err != nil {
					fmt.Fprintf(c.ErrOrStderr(), "the token, which is used up, could not be removed: %v\n", err)
				}
			}
			fmt.Fprintln(c.OutOrStdout(), "joined. Start this replica with 'keelson-controlplane run'.")
			return nil
		},
	}
	identity(c, &cfg)
	c.Flags().BoolVar(&cfg.Standby, "standby", false,
		"join without a vote: this replica has everything and serves, and gets the vote of one that dies where the others run with --replace-dead-after (docs/how-to/replace-replicas-automatically.md)")
	c.Flags().StringVar(&token, "token", "", "join token for a control-plane replica")
	c.Flags().StringVar(&tokenFile, "token-file", "", "file that holds the join token; it is removed when the replica has joined")
	c.Flags().StringArrayVar(&servers, "server", nil, "address of a replica, with the port at which it listens for agents when that is not 6444 (repeatable)")
	return c
}

// entryImage is the image of the proxies of a release, as its bin/images/entry.tar has it: a replica of another release that
// leads has other proxies made. A tag has no '+'.
func entryImage(version string) string {
	return "keelson.dev/entry:" + strings.ReplaceAll(version, "+", "-")
}

func runCommand(version string) *cobra.Command {
	c := &cobra.Command{
		Use:   "run",
		Short: "Run this replica",
		Long: "Run this replica. On SIGTERM it hands leadership over and ends; on SIGHUP it reads the encryption keys again\n" +
			"(as it does by itself when their file changes). Certificates renew themselves.",
		Example: "  keelson-controlplane run\n" +
			"  keelson-controlplane run --store-quota 4Gi --encryption-keys /etc/keelson/keys\n" +
			"  keelson-controlplane run --backup-schedule '30 2 * * *' --backup-folder /backups",
		Args: cobra.NoArgs,
	}
	judged := runFlags(c, version)
	c.RunE = func(c *cobra.Command, _ []string) error {
		cfg, err := judged()
		if err != nil {
			return err
		}
		level := slog.LevelInfo
		if debug, _ := c.Flags().GetBool("debug"); debug {
			level = slog.LevelDebug
		}
		cfg.Recent = logtail.New(recentLog)
		cfg.Log = slog.New(slog.NewTextHandler(io.MultiWriter(os.Stderr, cfg.Recent), &slog.HandlerOptions{Level: level})).With("replica", cfg.Name)
		cfg.Flags = flagValues(c)
		memory.SetLimit(cfg.MemoryLimit)
		if err := memory.SetOOMScore(memory.DaemonOOMScore); err != nil {
			cfg.Log.Warn("this replica cannot be shielded from the OOM killer", "error", err)
		}
		return server.Run(c.Context(), cfg)
	}
	return c
}

func checkCommand(version string) *cobra.Command {
	c := &cobra.Command{
		Use:   "check",
		Short: "Say what is wrong with the settings of run, and do nothing else",
		Long: "Say what 'run' would refuse of the file of settings, the environment and the command line, of which it takes the same flags,\n" +
			"and of the files that these name. Nobody is asked over the network.\n" +
			"The replica is not touched: it may run, or not be there yet, if the settings have its address.",
		Example: "  keelson-controlplane check --config /etc/keelson/controlplane.yaml",
		Args:    cobra.NoArgs,
	}
	judged := runFlags(c, version)
	c.RunE = func(*cobra.Command, []string) error {
		cfg, err := judged()
		if err != nil {
			return err
		}
		return server.Check(cfg)
	}
	return c
}

// runFlags adds the flags of run, and returns what judges them, once they have their values, and makes a configuration of them.
func runFlags(c *cobra.Command, version string) (judged func() (server.Config, error)) {
	cfg := server.Config{Version: version}
	eviction := 0
	identity(c, &cfg)
	mayKnow(c)
	c.Flags().StringVar(&cfg.SharedAPI, "api-address-shared", "",
		"IPv4 address of the replicas' link that the leader adds to its machine and announces, so that the API has one that follows it (docs/how-to/share-an-api-address.md); the same on every replica")
	c.Flags().IntVar(&eviction, "eviction-seconds", 15, "seconds after which pods leave a node that was lost, where they have no toleration that says otherwise")
	c.Flags().StringVar(&cfg.AdmissionConfig, "admission-control-config-file", "",
		"file with the defaults and exemptions of Pod Security: an AdmissionConfiguration or a PodSecurityConfiguration")
	c.Flags().StringVar(&cfg.SchedulerConfig, "scheduler-config", "",
		"file with the scheduler's profiles: a KubeSchedulerConfiguration (docs/how-to/configure-the-scheduler.md); the same on every replica")
	rebalances := rebalanceFlag(c, &cfg)
	replaces := replaceFlag(c, &cfg)
	c.Flags().StringVar(&cfg.EntryImage, "entry-image", entryImage(version), "image of the proxies that serve Ingresses and Gateways (docs/reference/ingress.md, docs/reference/gateway.md)")
	plugins := pluginFlags(c, &cfg)
	auditFlags(c, &cfg.Audit)
	access := accessFlags(c, &cfg)
	keeping := backupFlags(c, &cfg.Backups)
	c.Flags().DurationVar(&cfg.ShutdownDelay, "shutdown-delay-duration", defaultShutdownDelay,
		"for how long a replica that was told to end still answers, not ready, so that nobody sends it more")
	c.Flags().Bool("debug", false, "log more")
	finish := storeFlags(c, &cfg.Store)
	var limit string
	c.Flags().StringVar(&limit, "memory-limit", "", "memory that this replica may take: what it keeps is bounded by it, and what it takes on at once (default: half of the machine's or control group's)")
	return func() (server.Config, error) {
		if eviction < 0 {
			return cfg, fmt.Errorf("--eviction-seconds %d: want 0 or more", eviction)
		}
		if cfg.ShutdownDelay < 0 {
			return cfg, fmt.Errorf("--shutdown-delay-duration %v: want 0 or more", cfg.ShutdownDelay)
		}
		if err := errors.Join(finish(), access(), plugins(), rebalances(), replaces(), keeping()); err != nil {
			return cfg, err
		}
		cfg.PodEviction = time.Duration(eviction) * time.Second
		var err error
		cfg.MemoryLimit, err = memoryLimit(limit)
		return cfg, err
	}
}

// recentLog is how much of its log a replica remembers, in bytes.
const recentLog = 256 << 10

// defaultShutdownDelay is twice the time in which the replicas hear of each other's readiness.
const defaultShutdownDelay = 2 * time.Second

// flagValues are the flags of a command with their values. None of run's flags is a secret: those are in files.
func flagValues(c *cobra.Command) map[string]string {
	out := map[string]string{}
	c.Flags().VisitAll(func(f *pflag.Flag) { out[f.Name] = f.Value.String() })
	return out
}

// rebalanceFlag adds the pace at which pods move on request.
func rebalanceFlag(c *cobra.Command, cfg *server.Config) (check func() error) {
	c.Flags().DurationVar(&cfg.RebalanceInterval, "rebalance-interval", time.Minute,
		"time between two pods that move because their workload asks to be rebalanced (docs/how-to/rebalance-pods.md)")
	return func() error {
		if cfg.RebalanceInterval < time.Second {
			return fmt.Errorf("--rebalance-interval %v: want at least 1s", cfg.RebalanceInterval)
		}
		return nil
	}
}

// replaceFlag adds the time after which a standby takes the place of a replica that is silent.
func replaceFlag(c *cobra.Command, cfg *server.Config) (check func() error) {
	c.Flags().DurationVar(&cfg.ReplaceDeadAfter, "replace-dead-after", 0,
		"time for which a voting replica has to be silent for a standby to take its place (docs/how-to/replace-replicas-automatically.md); the same on every replica; 0 = never")
	return func() error {
		if d := cfg.ReplaceDeadAfter; d != 0 && d < server.LeastReplaceDeadAfter {
			return fmt.Errorf("--replace-dead-after %v: want at least %v, for a replica that is started anew is silent for a while and has to join anew once it was replaced; or 0 for never",
				d, server.LeastReplaceDeadAfter)
		}
		return nil
	}
}

// leastMemory is what a replica needs to be of any use.
const leastMemory = 256 << 20

// memoryLimit reads --memory-limit; "" is half of what there is.
func memoryLimit(flag string) (int64, error) {
	if flag != "" {
		n, err := bytesOf("--memory-limit", flag)
		if err == nil && n < leastMemory {
			err = fmt.Errorf("--memory-limit %s: a replica needs 256Mi at least", flag)
		}
		return n, err
	}
	n, err := memory.Available()
	return max(n/2, leastMemory), err
}

// auditFlags adds what an operator may choose of the record of requests, under Kubernetes' names.
func auditFlags(c *cobra.Command, o *server.AuditOptions) {
	*o = server.DefaultAudit()
	f := c.Flags()
	f.StringVar(&o.PolicyFile, "audit-policy-file", "", "audit.k8s.io/v1 Policy of what is recorded (default: every request that changes something or is refused, without bodies)")
	f.StringVar(&o.LogPath, "audit-log-path", "", "file of the records, - for standard output (default: audit/audit.log in the data folder)")
	f.IntVar(&o.MaxSize, "audit-log-maxsize", o.MaxSize, "megabytes of an audit log file before the next one is begun")
	f.IntVar(&o.MaxBackups, "audit-log-maxbackup", o.MaxBackups, "how many older audit log files are kept; 0 keeps all")
	f.IntVar(&o.MaxAge, "audit-log-maxage", o.MaxAge, "days for which older audit log files are kept; 0 keeps them for ever")
	f.StringVar(&o.Mode, "audit-log-mode", o.Mode, "batch (no request waits for the log, lost records are counted) or blocking-strict (what cannot be recorded is refused)")
}

// storeFlags adds what an operator may choose of a running store. finish reads the sizes.
func storeFlags(c *cobra.Command, o *server.StoreOptions) (finish func() error) {
	diskFlags(c, o)
	var quota, snapshot string
	f := c.Flags()
	f.StringVar(&quota, "store-quota", "8Gi", "size of objects and their history at which the store takes nothing new")
	f.StringVar(&snapshot, "snapshot-bytes", "64Mi", "size of the log after which a snapshot is taken")
	f.IntVar(&o.HistoryRevisions, "history-revisions", 20000, "revisions kept for watches that are behind")
	f.DurationVar(&o.HistoryAge, "history-age", 5*time.Minute, "and for how long")
	f.DurationVar(&o.Heartbeat, "heartbeat-timeout", server.DefaultHeartbeat,
		"how long a leader may be silent before another is elected; more on machines or networks that stall, the same on every replica (docs/explanation/leader-election.md)")
	f.DurationVar(&o.CompareEvery, "compare-interval", 10*time.Minute, "how often the leader compares the replicas' states; negative = never")
	return func() (err error) {
		if o.Quota, err = bytesOf("--store-quota", quota); err != nil {
			return err
		}
		if o.SnapshotBytes, err = bytesOf("--snapshot-bytes", snapshot); err != nil {
			return err
		}
		for _, z := range []struct {
			flag string
			zero bool
		}{{"--history-revisions", o.HistoryRevisions <= 0}, {"--history-age", o.HistoryAge <= 0}, {"--compare-interval", o.CompareEvery == 0}, {"--heartbeat-timeout", o.Heartbeat == 0}} {
			if z.zero {
				return fmt.Errorf("%s: want more than 0", z.flag)
			}
		}
		return nil
	}
}

// diskFlags adds what every verb must know to read the store on this machine's disk.
func diskFlags(c *cobra.Command, o *server.StoreOptions) {
	c.Flags().StringVar(&o.LogStore, "log-store", "", "what keeps the log: bolt or wal (default: what is there, bolt for a new one; 'convert-log' changes it)")
	c.Flags().StringVar(&o.Keys, "encryption-keys", "", "file of keys that encrypt the store on disk (default: pki/store.keys of the data folder, where there is one)")
}

// bytesOf reads a size such as 512Mi.
func bytesOf(flag, text string) (int64, error) {
	q, err := resource.ParseQuantity(text)
	if err != nil {
		return 0, fmt.Errorf("%s %q: want a size such as 512Mi or 8Gi", flag, text)
	}
	if q.Value() <= 0 {
		return 0, fmt.Errorf("%s %q: want more than 0", flag, text)
	}
	return q.Value(), nil
}
