// Package server wires one control-plane replica: the raft store, the registry
// over it, the apiserver, the fleet service, and on the leader the controllers
// and the scheduler. It is the only package that knows all of them.
package server

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	authnfile "keelson.dev/keelson/controlplane/apiserver/authn/config"
	authzfile "keelson.dev/keelson/controlplane/apiserver/authz/config"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/recovery/backups"
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
	Store            datadir.StoreOptions
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

// Dir returns the data directory of the replica.
func (c Config) Dir() datadir.Dir {
	level := uint32(datadir.FeatureLevel)
	if c.featureLevel != nil {
		level = *c.featureLevel
	}
	return datadir.Dir{Name: c.Name, Path: c.DataDir, Advertise: c.Advertise, Store: c.Store, Log: c.Log, FeatureLevel: level}
}

// addressed is c with the address that the replica had last, where none is given.
func (c Config) addressed() (Config, error) {
	d, err := c.Dir().WithAddress()
	c.Advertise = d.Advertise
	return c, err
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
	return c.Store.Check()
}
