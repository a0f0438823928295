// Package server wires one control-plane replica: the raft store, the registry
// over it, the apiserver, the fleet service, and on the leader the controllers
// and the scheduler. It is the only package that knows all of them.
package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"time"

	authnfile "keelson.dev/keelson/controlplane/apiserver/authn/config"
	authzfile "keelson.dev/keelson/controlplane/apiserver/authz/config"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/server/backups"
	"keelson.dev/keelson/controlplane/vip"
	"keelson.dev/keelson/internal/logtail"
)

// Config is what one replica is started with.
type Config struct {
	Name      string // of this replica; it never changes for a DataDir
	DataDir   string // made by Init or Join
	Advertise string // the address under which agents, users and replicas reach this one

	// SharedAPI is an IPv4 address that the leader adds to its machine, so that the API has one that follows it; "" = none.
	// All replicas should be given the same.
	SharedAPI string

	// PodEviction is how long pods stay on a node that was lost, where they do not say otherwise by a toleration: it
	// becomes their tolerationSeconds; 0 = 20 seconds. All replicas should be given the same.
	PodEviction time.Duration
	// AdmissionConfig is a file that configures admission plugins (Pod Security's defaults and exemptions); "" = none.
	AdmissionConfig string
	// SchedulerConfig is a KubeSchedulerConfiguration; "" = none. All replicas should be given the same.
	SchedulerConfig string
	// Standby is of Join: this replica becomes a member without a vote, which gets that of a replica that dies.
	Standby bool
	// ReplaceDeadAfter is for how long a voter has to be silent for a standby to take its place; 0 = that is never done.
	// All replicas should be given the same.
	ReplaceDeadAfter time.Duration
	// RebalanceInterval is how long at least is between two pods that are moved on request; 0 = a minute.
	RebalanceInterval time.Duration
	// EntryImage is the image of the proxies that serve Ingresses and Gateways; "" = keelson.dev/entry:dev. All replicas should be given the same.
	EntryImage string
	// AdmissionPlugins are those that run on request (admission.Choose).
	AdmissionPlugins []string
	// ExternalIPRanges are the addresses that Services may name in spec.externalIPs; empty = all that the cluster does not
	// use itself. All replicas should be given the same.
	ExternalIPRanges []netip.Prefix
	// PodAddressRanges are the addresses of pods on nodes with another network configuration than Keelson's; empty = any.
	// MirrorPodPeers makes mirror pods endpoints of Services and peers of policies. All replicas should be given the same.
	PodAddressRanges []netip.Prefix
	MirrorPodPeers   bool
	Audit            AuditOptions
	Authentication   authnfile.Options // the zero value: certificates and this cluster's tokens
	Authorization    authzfile.Options // the zero value: Node, RBAC
	Store            StoreOptions
	Backups          backups.Options // the zero value: none by themselves
	// MemoryLimit is what this replica may take, in bytes; 0 = apiserver's default.
	MemoryLimit int64
	// Heartbeat is how often the agents of this replica say that they live; 0 = every second.
	Heartbeat time.Duration
	// ShutdownDelay is for how long a replica that was told to end still answers, unready; 0 = not at all.
	ShutdownDelay time.Duration
	// Flags are those of the daemon with their values, for /flagz.
	Flags   map[string]string
	Log     *slog.Logger
	Recent  *logtail.Lines // the last lines of Log, for support bundles; nil = none
	Version string

	// certificateLife replaces the life of this replica's own certificates; tests shorten it.
	certificateLife time.Duration
	// verifyBytes replaces how long a backup may be that this replica verifies; tests shorten it.
	verifyBytes int64
	// wired is called with the replica before it runs; tests ask its parts.
	wired func(*Replica)
	// guest is set for a replica that serves a backup (servebackup.go): it does none of the leader's work.
	guest *guest
	// featureLevel makes this replica one of a release that understands another level; tests set it.
	featureLevel *uint32
}

const defaultPodEviction = 20 * time.Second

// Cluster is what all replicas of a cluster have in common. It is fixed by Init
// and handed to every joining replica.
type Cluster struct {
	Name        string `json:"name"`
	ClusterCIDR string `json:"clusterCIDR"` // one prefix, or one of each family with a comma between
	ServiceCIDR string `json:"serviceCIDR"` // of the same families in the same order
	Domain      string `json:"domain"`
	APIPort     int    `json:"apiPort"`
	FleetPort   int    `json:"fleetPort"`
	PeerPort    int    `json:"peerPort"`
	// ID tells this cluster from all others, also from those of its name.
	// A cluster that was made before there were any gets one from its name and CA.
	ID string `json:"id,omitempty"`
	// Encrypted says that no replica may write its store in clear for want of a
	// key file. Clusters that were made before there was one by default have it false.
	Encrypted bool `json:"encrypted,omitempty"`
}

// Defaults of a cluster.
func (c *Cluster) defaults() {
	set := func(s *string, v string) {
		if *s == "" {
			*s = v
		}
	}
	set(&c.Name, "keelson")
	set(&c.ClusterCIDR, "10.244.0.0/16")
	set(&c.ServiceCIDR, "10.96.0.0/16")
	set(&c.Domain, "cluster.local")
	for _, p := range []struct {
		port *int
		v    int
	}{{&c.APIPort, 6443}, {&c.FleetPort, 6444}, {&c.PeerPort, 6445}} {
		if *p.port == 0 {
			*p.port = p.v
		}
	}
}

// The files of a replica below its data folder.
const (
	pkiFolder    = "pki"
	raftFolder   = "raft"
	clusterFile  = "cluster.json"
	foundersFile = "founder.json"       // on the replica that made the cluster: tokens to be stored once there is a store
	peersFile    = "peers.json"         // on a replica that is to become a member: whom to ask for it
	newcomerFile = "newcomer.json"      // the same list once the group has taken it in, until it has all that the group has
	membersFile  = "members.json"       // who was a member last, for a replica that has to be rebuilt
	storeFile    = "store.json"         // what was chosen for the disk of the store
	standbyFile  = "standby.json"       // on a replica that joined without a vote, until it gets one
	addressFile  = "address.json"       // what Init or Join was told of this replica's address, until the members' list has it
	levelFile    = "feature-level.json" // the level of what is stored, as this replica knows it
	lockFile     = "lock"               // held by the program that uses the folder
	adminFile    = "admin.kubeconfig"
)

// ErrNotInitialised says that a data folder belongs to no cluster.
var ErrNotInitialised = errors.New("the data folder belongs to no cluster: run 'init' on the first replica or 'join' on a further one")

func writeJSON(path string, v any) error {
	raw, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return pki.WriteFile(path, append(raw, '\n'))
}

// readJSON reports whether the file was there.
func readJSON(path string, v any) (bool, error) {
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if err := json.Unmarshal(raw, v); err != nil {
		return false, fmt.Errorf("reading %s: %w", path, err)
	}
	return true, nil
}

// load reads what Init or Join left.
func (c Config) load() (Cluster, *pki.Trust, error) {
	var cluster Cluster
	found, err := readJSON(filepath.Join(c.DataDir, clusterFile), &cluster)
	if err != nil {
		return cluster, nil, err
	}
	if !found {
		return cluster, nil, fmt.Errorf("%s: %w", c.DataDir, ErrNotInitialised)
	}
	trust, err := pki.Load(filepath.Join(c.DataDir, pkiFolder))
	if err != nil {
		return cluster, nil, err
	}
	return cluster, trust, cluster.identify(trust)
}

// check names the flag that is wrong.
func (c Config) check() error {
	if c.Name == "" {
		return errors.New("--name: a replica needs a name, such as its hostname")
	}
	if _, err := netip.ParseAddr(c.Advertise); err != nil {
		return fmt.Errorf("--advertise-address %q: give the IP address under which others reach this replica", c.Advertise)
	}
	if c.DataDir == "" {
		return errors.New("--data-dir: a replica needs a folder for its data")
	}
	if c.SharedAPI != "" {
		if _, err := vip.Check(c.SharedAPI, c.Advertise); err != nil {
			return err
		}
	}
	return c.Store.check()
}

func at(host string, port int) string { return net.JoinHostPort(host, strconv.Itoa(port)) }
