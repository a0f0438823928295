// Package server assembles one control-plane replica: the raft store, the registry, the API server,
// the node gateway, and the controllers and the scheduler. The registry stores its objects in the
// raft store. The controllers and the scheduler run on the leader. It is the only package that
// imports all of them.
package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"k8s.io/utils/ptr"

	authnfile "keelson.dev/keelson/controlplane/apiserver/authn/config"
	authzfile "keelson.dev/keelson/controlplane/apiserver/authz/config"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/membership"
	"keelson.dev/keelson/controlplane/recovery/backups"
	"keelson.dev/keelson/controlplane/server/auditing"
	"keelson.dev/keelson/controlplane/vip"
	"keelson.dev/keelson/internal/logtail"
)

// Config is the configuration of one replica. Settings that are described as "equal on all
// replicas" must have the same value on every replica, because any replica may become the leader.
type Config struct {
	Name       string // name of this replica; it never changes for a DataDir
	DataDir    string // data directory, which Init or Join has created
	Advertise  string // IP address at which agents, replicas and users reach this replica
	Membership MembershipConfig
	Network    NetworkConfig
	Access     AccessConfig
	Admission  AdmissionConfig
	Leader     LeaderConfig
	Store      datadir.StoreOptions
	Backups    backups.Options // the zero value means no scheduled backups
	Limits     LimitsConfig
	Timing     TimingConfig
	Process    ProcessConfig

	// Wired is called with the replica after its components are created and before they run. It may
	// be nil. Only tests set it.
	Wired func(*Replica)
	// servedBackup is not nil on a temporary replica that serves a backup (servebackup.go). Such a
	// replica runs neither controllers nor the scheduler.
	servedBackup *servedBackup
}

// MembershipConfig configures this replica as a member of the raft cluster.
type MembershipConfig struct {
	// Standby makes Join create a member without a vote, which can replace a dead voter.
	Standby bool
	// ReplaceDeadAfter is how long a voter must be unreachable before a standby replaces it. 0
	// means never. It is equal on all replicas.
	ReplaceDeadAfter time.Duration
	// FeatureLevel is the highest feature level that this replica supports. nil means the level of
	// this release.
	FeatureLevel *uint32
}

// NetworkConfig contains the addresses that the API uses or validates. All fields are equal on all
// replicas.
type NetworkConfig struct {
	// SharedAPI is a virtual IPv4 address of the API, which the leader adds to its machine. It may
	// be empty.
	SharedAPI string
	// ExternalIPRanges are the addresses that are allowed in spec.externalIPs of Services. If
	// empty, all addresses are allowed that the cluster does not use itself.
	ExternalIPRanges []netip.Prefix
	// PodAddressRanges are the addresses that pods may have on nodes with a CNI plugin other than
	// Keelson's. If empty, they may have any address.
	PodAddressRanges []netip.Prefix
	// MirrorPodPeers makes mirror pods endpoints of Services and peers of network policies.
	MirrorPodPeers bool
}

// AccessConfig configures authentication, authorization and the audit log of the API.
type AccessConfig struct {
	Authentication authnfile.Options // zero value: client certificates and service account tokens of this cluster
	Authorization  authzfile.Options // zero value: Node, RBAC
	Audit          auditing.Options  // zero value: auditing.Default()
}

// AdmissionConfig configures the admission plugins of the API.
type AdmissionConfig struct {
	// ConfigFile is the path of a file that configures admission plugins (the defaults and
	// exemptions of Pod Security). It may be empty.
	ConfigFile string
	// Plugins are the names of the optional admission plugins that are enabled, as returned by
	// builtin.Choose.
	Plugins []string
	// PodEviction is how long pods stay bound to a node that is lost. Admission sets it as the
	// tolerationSeconds of the tolerations for lost nodes, on pods without such tolerations. 0
	// means 20 seconds. It is equal on all replicas.
	PodEviction time.Duration
}

// LeaderConfig configures the scheduler and the controllers, which run on the leader.
type LeaderConfig struct {
	// SchedulerConfig is the path of a KubeSchedulerConfiguration. It may be empty. It is equal on
	// all replicas.
	SchedulerConfig string
	// RebalanceInterval is the minimum time between two pods that are moved because their workload
	// requests rebalancing. 0 means a minute.
	RebalanceInterval time.Duration
	// IngressProxyImage is the image of the proxies that serve Ingresses and Gateways. The default
	// is keelson.dev/entry:dev. It is equal on all replicas.
	IngressProxyImage string
}

// LimitsConfig limits the memory of this replica.
type LimitsConfig struct {
	// Memory is the memory limit of this replica, in bytes. 0 means the API server's default.
	Memory int64
	// VerifiedBackup is the maximum size of a backup that this replica verifies, in bytes. 0 means
	// a quarter of Memory.
	VerifiedBackup int64
}

// TimingConfig contains intervals, delays and lifetimes.
type TimingConfig struct {
	// AgentHeartbeat is the interval at which agents send heartbeats to this replica while they
	// have a session with it. 0 means a second.
	AgentHeartbeat time.Duration
	// ShutdownDelay is how long a replica that shuts down still serves requests, while it reports
	// that it is not ready. 0 means no delay.
	ShutdownDelay time.Duration
	// CertificateLife replaces the lifetime of this replica's own certificates. 0 means the
	// default.
	CertificateLife time.Duration
}

// ProcessConfig describes the process that runs the replica.
type ProcessConfig struct {
	Version   string
	Flags     map[string]string // values of the daemon's flags, for /flagz
	Log       *slog.Logger
	RecentLog *logtail.Lines // the last lines of Log, for support bundles; may be nil
}

const defaultPodEviction = 20 * time.Second

// Dir returns the data directory of the replica.
func (c Config) Dir() datadir.Dir {
	level := ptr.Deref(c.Membership.FeatureLevel, uint32(datadir.FeatureLevel))
	return datadir.Dir{Name: c.Name, Path: c.DataDir, Advertise: c.Advertise, Store: c.Store, Log: c.Process.Log,
		FeatureLevel: level}
}

// withAddress returns a copy of c. If Advertise is empty in c, the copy has the replica's last
// address, which it reads from the data directory.
func (c Config) withAddress() (Config, error) {
	d, err := c.Dir().WithAddress()
	c.Advertise = d.Advertise
	return c, err
}

// checkSettings validates the settings that need no file. Its error names the invalid flag.
func (c Config) checkSettings() error {
	if c.Name == "" {
		return errors.New("--name: a replica needs a name, such as its hostname")
	}
	if _, err := netip.ParseAddr(c.Advertise); err != nil {
		return fmt.Errorf("--advertise-address %q: want the IP address at which others reach this replica",
			c.Advertise)
	}
	if c.DataDir == "" {
		return errors.New("--data-dir: a replica needs a data directory")
	}
	if c.Network.SharedAPI != "" {
		if _, err := vip.ParseAddress(c.Network.SharedAPI, c.Advertise); err != nil {
			return err
		}
	}
	return c.Store.Check()
}

// defaultMemory is the API server's default for LimitsConfig.Memory, in bytes.
const defaultMemory = 2 << 30

// maxVerifyBytes returns the maximum size of a backup that this replica verifies, in bytes. The
// limit is needed because the whole backup is in memory while it is verified.
func (c Config) maxVerifyBytes() int64 {
	return cmp.Or(c.Limits.VerifiedBackup, cmp.Or(c.Limits.Memory, defaultMemory)/4)
}

// InitOptions are the options of Init that are neither part of Config nor of the cluster's
// configuration.
type InitOptions = membership.InitOptions

// InitResult contains the first join tokens and the paths of the files that Init created.
type InitResult = membership.InitResult

// Init creates a new cluster in the data directory of this replica. It returns an error if the
// directory already belongs to a cluster.
func Init(c Config, cluster datadir.Cluster, o InitOptions) (InitResult, error) {
	if err := c.checkSettings(); err != nil {
		return InitResult{}, err
	}
	return membership.InitCluster(c.Dir(), cluster, o)
}

// Join requests the keys and the configuration of an existing cluster from one of servers, with a
// join token. It creates the data directory of this replica. The replica becomes a member of the
// cluster when it runs (Run).
func Join(ctx context.Context, c Config, token string, servers []string) error {
	if err := c.checkSettings(); err != nil {
		return err
	}
	return membership.Join(ctx, c.Dir(), c.Membership.Standby, token, servers)
}
