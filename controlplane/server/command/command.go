// Package command implements the command line of keelson-controlplane.
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

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/membership/autopilot"
	"keelson.dev/keelson/controlplane/server"
	"keelson.dev/keelson/controlplane/server/auditing"
	"keelson.dev/keelson/internal/logtail"
	"keelson.dev/keelson/internal/memory"
)

// New returns the command keelson-controlplane with its subcommands. version is the release.
func New(version string) *cobra.Command {
	root := &cobra.Command{
		Use:   "keelson-controlplane",
		Short: "Run and maintain one replica of a Keelson control plane",
		Long: "Run and maintain one replica of a Keelson control plane: a store that is replicated with raft, the\n" +
			"Kubernetes API, and, on the leader, the controllers and the scheduler.\n" +
			"\n" +
			"A setting that is not given by a flag is read from the environment, or else from the configuration\n" +
			"file (--config).",
		Example:       "  keelson-controlplane init --advertise-address 192.0.2.11\n  keelson-controlplane run",
		Version:       version,
		SilenceErrors: true, SilenceUsage: true,
	}
	root.AddCommand(initCommand(), joinCommand(), runCommand(version), checkCommand(version),
		restoreCommand(), verifyCommand(), recoverCommand(), rebuildCommand(), convertCommand(),
		requireSubcommand(backupCommand(version)), requireSubcommand(keysCommand()), requireSubcommand(peerCACommand()),
		inspectCommand(),
		addFamilyCommand(),
		withPreviousName(addFamilyCommand(), "add-family"))
	// Upgrades read the second line, because a replica must never return to a release below the
	// stored feature level. The version template is not set: SetVersionTemplate would link every
	// method of every type into the program.
	root.Version = fmt.Sprintf("%s\nfeature level %d", version, datadir.FeatureLevel)
	applySettings(root)
	return useProgramName(root, os.Args[0])
}

const defaultDataDir = "/var/lib/keelson/controlplane"

// addIdentityFlags adds the flags that all commands share: the name, the address and the data
// directory of the replica.
func addIdentityFlags(c *cobra.Command, cfg *server.Config) {
	host, _ := os.Hostname()
	f := c.Flags()
	f.StringVar(&cfg.Name, "name", host, "name of this replica; it must never change")
	f.StringVar(&cfg.DataDir, "data-dir", defaultDataDir, "data directory of this replica")
	f.StringVar(&cfg.Advertise, "advertise-address", "",
		"IP address at which clients, agents and other replicas reach this replica")
}

// describeAddressDefault adds to the help of --advertise-address that the default is the address in
// the data directory.
func describeAddressDefault(c *cobra.Command) {
	c.Flags().Lookup("advertise-address").Usage += " (default: the address of the last run, or the address given to " +
		"'init' or 'join')"
}

func initCommand() *cobra.Command {
	var cfg server.Config
	var cluster datadir.Cluster
	var founding server.InitOptions
	var output string
	c := &cobra.Command{
		Use:     "init",
		Short:   "Create a cluster: its keys, its configuration, its first replica and its first join tokens",
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
			fmt.Fprintf(c.OutOrStdout(), "cluster created. Start this replica with 'keelson-controlplane run'.\n\n"+
				"kubeconfig of the administrator:  %s\nfurther replicas join with token: %s\nworkers join with "+
				"token:          %s\n"+
				"(the first is valid for %s within an hour, the second for %d uses within 24 hours; 'kctl "+
				"cluster token create' creates others)\n",
				f.Kubeconfig, f.ControlPlaneToken, f.NodeToken, formatUses(founding.ReplicaTokenUses),
				founding.NodeTokenUses)
			if f.EncryptionKeys != "" {
				fmt.Fprintf(c.OutOrStdout(), "key file of the stores and backups: %s (keep a copy elsewhere: its loss "+
					"is the loss of the data)\n", f.EncryptionKeys)
			}
			return nil
		},
	}
	addIdentityFlags(c, &cfg)
	f := c.Flags()
	f.StringVar(&cluster.Name, "cluster-name", "keelson", "name of the cluster")
	f.StringVar(&cluster.ClusterCIDR, "cluster-cidr", "10.244.0.0/16",
		"address range of pods: one CIDR, or an IPv4 and an IPv6 CIDR separated by a comma, the primary family first")
	f.StringVar(&cluster.ServiceCIDR, "service-cidr", "10.96.0.0/16",
		"address range of Services: one CIDR for each family of --cluster-cidr, in the same order")
	f.StringVar(&cluster.Domain, "cluster-domain", "cluster.local", "DNS domain of the cluster")
	f.IntVar(&founding.NodeTokenUses, "node-token-uses", 100,
		"how many workers can join with the node token that is printed")
	f.IntVar(&founding.ReplicaTokenUses, "replica-token-uses", 1,
		"how many replicas can join with the replica token that is printed")
	f.StringVar(&founding.KubeconfigServer, "kubeconfig-server", "",
		"URL of the API in the administrator's kubeconfig (default: this replica)")
	f.StringVar(&cfg.Store.Keys, "encryption-keys", "",
		"key file that encrypts the stores of all replicas, which you copy to each replica; 'none' disables "+
			"encryption (default: a new one in pki of the data directory, which joining replicas receive)")
	f.StringVarP(&output, "output", "o", "text", "output format: text or json")
	return c
}

func formatUses(n int) string {
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
		Use:   "join",
		Short: "Join this machine to a cluster as a control-plane replica",
		Example: "  keelson-controlplane join --advertise-address 192.0.2.12 --token-file /root/token " +
			"--server 192.0.2.11\n" +
			"  keelson-controlplane join --advertise-address 192.0.2.12 --token keelson1.controlplane... --server " +
			"192.0.2.11",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if tokenFile != "" && token == "" {
				raw, err := os.ReadFile(tokenFile)
				if err != nil {
					return fmt.Errorf("--token-file: %w", err)
				}
				token = string(raw)
			}
			if token == "" || len(servers) == 0 {
				return fmt.Errorf("--token (or --token-file) and --server are required: 'kctl cluster token " +
					"create --role controlplane' creates a token")
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
	addIdentityFlags(c, &cfg)
	c.Flags().BoolVar(&cfg.Membership.Standby, "standby", false,
		"join as a standby, which serves requests but has no vote; it replaces an unreachable voter if the other "+
			"replicas run with --replace-dead-after (docs/how-to/replace-replicas-automatically.md)")
	c.Flags().StringVar(&token, "token", "", "join token for a control-plane replica")
	c.Flags().StringVar(&tokenFile, "token-file", "",
		"file with the join token for a control-plane replica; it is removed after the replica has joined")
	c.Flags().StringArrayVar(&servers, "server", nil,
		"address of a replica of the cluster, with its port for agents if that is not 6444 (repeatable)")
	return c
}

// entryImage returns the name of the container image of the ingress proxies that belong to a
// release. The name contains the release, so a leader with another release replaces the proxies. A
// '+' in version is replaced, because an image tag cannot contain it. bin/images/entry.tar contains
// the image.
func entryImage(version string) string {
	return "keelson.dev/entry:" + strings.ReplaceAll(version, "+", "-")
}

func runCommand(version string) *cobra.Command {
	c := &cobra.Command{
		Use:   "run",
		Short: "Run this replica",
		Long: "Run this replica. On SIGTERM it transfers its leadership and exits. On SIGHUP it reloads the key\n" +
			"file of the store, which it also does when that file changes. Certificates are renewed\n" +
			"automatically.",
		Example: "  keelson-controlplane run\n" +
			"  keelson-controlplane run --store-quota 4Gi --encryption-keys /etc/keelson/keys\n" +
			"  keelson-controlplane run --backup-schedule '30 2 * * *' --backup-folder /backups",
		Args: cobra.NoArgs,
	}
	parseConfig := runFlags(c, version)
	c.RunE = func(c *cobra.Command, _ []string) error {
		cfg, err := parseConfig()
		if err != nil {
			return err
		}
		level := slog.LevelInfo
		if debug, _ := c.Flags().GetBool("debug"); debug {
			level = slog.LevelDebug
		}
		cfg.Process.RecentLog = logtail.New(recentLog)
		cfg.Process.Log = slog.New(slog.NewTextHandler(io.MultiWriter(os.Stderr, cfg.Process.RecentLog),
			&slog.HandlerOptions{Level: level})).With("replica", cfg.Name)
		cfg.Process.Flags = flagValues(c)
		memory.SetLimit(cfg.Limits.Memory)
		if err := memory.SetOOMScore(memory.DaemonOOMScore); err != nil {
			cfg.Process.Log.Warn("this replica cannot be shielded from the OOM killer", "error", err)
		}
		return server.Run(c.Context(), cfg)
	}
	return c
}

func checkCommand(version string) *cobra.Command {
	c := &cobra.Command{
		Use:   "check",
		Short: "Check the settings of 'run' without starting the replica",
		Long: "Check the settings of 'run' without starting the replica: the configuration file, the environment,\n" +
			"the flags, which are those of 'run', and the files that they refer to. No network connection is\n" +
			"made. The replica may be running. It need not exist yet if the settings contain its address.",
		Example: "  keelson-controlplane check --config /etc/keelson/controlplane.yaml",
		Args:    cobra.NoArgs,
	}
	parseConfig := runFlags(c, version)
	c.RunE = func(*cobra.Command, []string) error {
		cfg, err := parseConfig()
		if err != nil {
			return err
		}
		return server.Check(cfg)
	}
	return c
}

// runFlags adds the flags of the command 'run'. After the flags are parsed, parseConfig validates
// them and returns the configuration.
func runFlags(c *cobra.Command, version string) (parseConfig func() (server.Config, error)) {
	cfg := server.Config{Process: server.ProcessConfig{Version: version}}
	eviction := 0
	addIdentityFlags(c, &cfg)
	describeAddressDefault(c)
	c.Flags().StringVar(&cfg.Network.SharedAPI, "api-address-shared", "",
		"virtual IPv4 address of the API, which the leader adds to its machine and announces on the replicas' "+
			"link (docs/how-to/share-an-api-address.md); must be the same on every replica")
	c.Flags().IntVar(&eviction, "eviction-seconds", 15,
		"seconds after which pods are evicted from a lost node, unless their tolerations set another time")
	c.Flags().StringVar(&cfg.Admission.ConfigFile, "admission-control-config-file", "",
		"file with the defaults and exemptions of Pod Security admission: an AdmissionConfiguration or a "+
			"PodSecurityConfiguration")
	c.Flags().StringVar(&cfg.Leader.SchedulerConfig, "scheduler-config", "",
		"file with the profiles of the scheduler: a KubeSchedulerConfiguration "+
			"(docs/how-to/configure-the-scheduler.md); must be the "+
			"same on every replica")
	rebalances := rebalanceFlag(c, &cfg)
	replaces := replaceFlag(c, &cfg)
	c.Flags().StringVar(&cfg.Leader.IngressProxyImage, "entry-image", entryImage(version),
		"image of the ingress proxies, which serve Ingresses and Gateways (docs/reference/ingress.md, "+
			"docs/reference/gateway.md)")
	plugins := pluginFlags(c, &cfg)
	auditFlags(c, &cfg.Access.Audit)
	access := accessFlags(c, &cfg)
	keeping := backupFlags(c, &cfg.Backups)
	c.Flags().DurationVar(&cfg.Timing.ShutdownDelay, "shutdown-delay-duration", defaultShutdownDelay,
		"how long a replica that is shutting down serves requests while it reports that it is not ready")
	c.Flags().Bool("debug", false, "log debug messages")
	finish := storeFlags(c, &cfg.Store)
	var limit string
	c.Flags().StringVar(&limit, "memory-limit", "",
		"memory limit of this replica, which bounds its caches and its concurrent requests (default: half of the "+
			"memory of the machine or control group)")
	return func() (server.Config, error) {
		if eviction < 0 {
			return cfg, fmt.Errorf("--eviction-seconds %d: want 0 or more", eviction)
		}
		if cfg.Timing.ShutdownDelay < 0 {
			return cfg, fmt.Errorf("--shutdown-delay-duration %v: want 0 or more", cfg.Timing.ShutdownDelay)
		}
		if err := errors.Join(finish(), access(), plugins(), rebalances(), replaces(), keeping()); err != nil {
			return cfg, err
		}
		cfg.Admission.PodEviction = time.Duration(eviction) * time.Second
		var err error
		cfg.Limits.Memory, err = memoryLimit(limit)
		return cfg, err
	}
}

// recentLog is how many bytes of its most recent log messages a replica keeps in memory.
const recentLog = 256 << 10

// defaultShutdownDelay is the default of --shutdown-delay. It is twice the interval at which
// replicas probe each other's readiness.
const defaultShutdownDelay = 2 * time.Second

// flagValues returns the values of a command's flags by their names. No value is a secret: secrets
// are passed in files.
func flagValues(c *cobra.Command) map[string]string {
	out := map[string]string{}
	c.Flags().VisitAll(func(f *pflag.Flag) { out[f.Name] = f.Value.String() })
	return out
}

// rebalanceFlag adds the flag --rebalance-interval. The returned function validates the value after
// the flags are parsed.
func rebalanceFlag(c *cobra.Command, cfg *server.Config) (check func() error) {
	c.Flags().DurationVar(&cfg.Leader.RebalanceInterval, "rebalance-interval", time.Minute,
		"minimum time between two pods that are moved because their workload requests rebalancing "+
			"(docs/how-to/rebalance-pods.md)")
	return func() error {
		if cfg.Leader.RebalanceInterval < time.Second {
			return fmt.Errorf("--rebalance-interval %v: want at least 1s", cfg.Leader.RebalanceInterval)
		}
		return nil
	}
}

// replaceFlag adds the flag --replace-dead-after. The returned function validates the value after
// the flags are parsed.
func replaceFlag(c *cobra.Command, cfg *server.Config) (check func() error) {
	c.Flags().DurationVar(&cfg.Membership.ReplaceDeadAfter, "replace-dead-after", 0,
		"how long a voting replica must be unreachable before a standby replaces it "+
			"(docs/how-to/replace-replicas-automatically.md); 0 "+
			"disables the replacement; must be the same on every replica")
	return func() error {
		if d := cfg.Membership.ReplaceDeadAfter; d != 0 && d < autopilot.MinReplaceAfter {
			return fmt.Errorf("--replace-dead-after %v: want at least %v, because a restarting replica does not "+
				"respond for a while and must join again once it was replaced; or 0 to disable it",
				d, autopilot.MinReplaceAfter)
		}
		return nil
	}
}

// minMemory is the minimum of --memory-limit, in bytes.
const minMemory = 256 << 20

// memoryLimit parses the value of --memory-limit and returns the limit in bytes. An empty value
// means half of the available memory, but at least minMemory.
func memoryLimit(flag string) (int64, error) {
	if flag != "" {
		n, err := parseBytes("--memory-limit", flag)
		if err == nil && n < minMemory {
			err = fmt.Errorf("--memory-limit %s: a replica needs at least 256Mi", flag)
		}
		return n, err
	}
	n, err := memory.Available()
	return max(n/2, minMemory), err
}

// auditFlags adds the flags of the audit log, with the names that kube-apiserver uses.
func auditFlags(c *cobra.Command, o *auditing.Options) {
	*o = auditing.Default()
	f := c.Flags()
	f.StringVar(&o.PolicyFile, "audit-policy-file", "",
		"file with the audit policy, audit.k8s.io/v1 (default: every request that changes something or is "+
			"refused, without bodies)")
	f.StringVar(&o.LogPath, "audit-log-path", "",
		"file of the audit log, '-' for standard output (default: audit/audit.log in the data directory)")
	f.IntVar(&o.MaxSize, "audit-log-maxsize", o.MaxSize,
		"maximum size of an audit log file in megabytes before it is rotated")
	f.IntVar(&o.MaxBackups, "audit-log-maxbackup", o.MaxBackups,
		"maximum number of old audit log files to keep; 0 keeps all")
	f.IntVar(&o.MaxAge, "audit-log-maxage", o.MaxAge,
		"maximum age of old audit log files in days; 0 keeps them forever")
	f.StringVar(&o.Mode, "audit-log-mode", o.Mode,
		"mode of the audit log: batch (requests do not wait; lost records are counted) or blocking-strict (a "+
			"request that cannot be recorded is rejected)")
}

// storeFlags adds the flags of the command run that configure the store. After the flags are
// parsed, finish converts the sizes and validates all values.
func storeFlags(c *cobra.Command, o *datadir.StoreOptions) (finish func() error) {
	diskFlags(c, o)
	var quota, snapshot string
	f := c.Flags()
	f.StringVar(&quota, "store-quota", "8Gi",
		"maximum size of the store, with its watch history; above it, the store rejects new data")
	f.StringVar(&snapshot, "snapshot-bytes", "64Mi", "size of the raft log after which a snapshot is taken")
	f.IntVar(&o.HistoryRevisions, "history-revisions", 20000, "maximum number of revisions in the watch history")
	f.DurationVar(&o.HistoryAge, "history-age", 5*time.Minute, "maximum age of revisions in the watch history")
	f.DurationVar(&o.Heartbeat, "heartbeat-timeout", datadir.DefaultHeartbeat,
		"how long a leader may be unreachable before another is elected; increase it on slow machines or "+
			"networks (docs/explanation/leader-election.md); must be the same on every replica")
	f.DurationVar(&o.CompareEvery, "compare-interval", 10*time.Minute,
		"interval at which the leader compares the state of the replicas; a negative value disables it")
	return func() (err error) {
		if o.Quota, err = parseBytes("--store-quota", quota); err != nil {
			return err
		}
		if o.SnapshotBytes, err = parseBytes("--snapshot-bytes", snapshot); err != nil {
			return err
		}
		for _, z := range []struct {
			flag string
			zero bool
		}{{"--history-revisions", o.HistoryRevisions <= 0}, {"--history-age", o.HistoryAge <= 0},
			{"--compare-interval", o.CompareEvery == 0}, {"--heartbeat-timeout", o.Heartbeat == 0}} {
			if z.zero {
				return fmt.Errorf("%s: want more than 0", z.flag)
			}
		}
		return nil
	}
}

// diskFlags adds the flags with which a command reads the store on the disk of this machine: the
// format of the raft log, and the key file.
func diskFlags(c *cobra.Command, o *datadir.StoreOptions) {
	c.Flags().StringVar(&o.LogStore, "log-store", "",
		"format of the raft log: bolt or wal (default: the existing format, or bolt for a new log; 'convert-log' "+
			"changes it)")
	c.Flags().StringVar(&o.Keys, "encryption-keys", "",
		"key file that encrypts the store on disk (default: pki/store.keys of the data directory, if it exists)")
}

// parseBytes parses a positive size such as 512Mi. Its error names the flag.
func parseBytes(flag, text string) (int64, error) {
	q, err := resource.ParseQuantity(text)
	if err != nil {
		return 0, fmt.Errorf("%s %q: want a size such as 512Mi or 8Gi", flag, text)
	}
	if q.Value() <= 0 {
		return 0, fmt.Errorf("%s %q: want more than 0", flag, text)
	}
	return q.Value(), nil
}
