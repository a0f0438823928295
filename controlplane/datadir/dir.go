// Package datadir describes the data directory of a replica: its files and the lock on them, the cluster that it
// belongs to, the configuration of its store, and the records that a replica compares before its store runs. The parts
// of the control plane that work on this directory share the package; it depends on none of them.
package datadir

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"keelson.dev/keelson/controlplane/pki"
)

// Dir is the data directory of one replica, with the settings on which its files depend.
type Dir struct {
	Name         string // of the replica; it never changes for a directory
	Path         string // made by init or join
	Advertise    string // the address under which agents, users and replicas reach the replica
	Store        StoreOptions
	Log          *slog.Logger
	FeatureLevel uint32 // the highest level that this release understands
}

// The files of a replica below its data folder.
const (
	PKIFolder    = "pki"
	RaftFolder   = "raft"
	ClusterFile  = "cluster.json"
	FounderFile  = "founder.json"       // on the replica that made the cluster: tokens to be stored once there is a store
	PeersFile    = "peers.json"         // on a replica that is to become a member: whom to ask for it
	NewcomerFile = "newcomer.json"      // the same list once the group has taken it in, until it has all that the group has
	MembersFile  = "members.json"       // who was a member last, for a replica that has to be rebuilt
	storeFile    = "store.json"         // what was chosen for the disk of the store
	StandbyFile  = "standby.json"       // on a replica that joined without a vote, until it gets one
	AddressFile  = "address.json"       // what Init or Join was told of this replica's address, until the members' list has it
	LevelFile    = "feature-level.json" // the level of what is stored, as this replica knows it
	lockFile     = "lock"               // held by the program that uses the folder
	AdminFile    = "admin.kubeconfig"
)

// ErrNotInitialised says that a data folder belongs to no cluster.
var ErrNotInitialised = errors.New("the data folder belongs to no cluster: run 'init' on the first replica or 'join' on a further one")

// WriteJSON writes a file as pki.WriteFile does.
func WriteJSON(path string, v any) error {
	raw, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return pki.WriteFile(path, append(raw, '\n'))
}

// ReadJSON reports whether the file was there.
func ReadJSON(path string, v any) (bool, error) {
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

// Load reads what Init or Join left.
func (d Dir) Load() (Cluster, *pki.Trust, error) {
	var cluster Cluster
	found, err := ReadJSON(filepath.Join(d.Path, ClusterFile), &cluster)
	if err != nil {
		return cluster, nil, err
	}
	if !found {
		return cluster, nil, fmt.Errorf("%s: %w", d.Path, ErrNotInitialised)
	}
	trust, err := pki.Load(filepath.Join(d.Path, PKIFolder))
	if err != nil {
		return cluster, nil, err
	}
	return cluster, trust, cluster.SetID(trust)
}

// ErrInUse says that another program has a data folder.
var ErrInUse = errors.New("the data folder is in use")

// Lock takes the data folder for this process, until release. Two programs that
// change one folder would ruin it. The kernel gives the lock back when a process dies.
func (d Dir) Lock() (release func(), err error) {
	path := filepath.Join(d.Path, lockFile)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("locking the data folder: %w", err)
	}
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		raw, _ := os.ReadFile(path)
		f.Close()
		return nil, fmt.Errorf("%s: %w by process %s: stop it first", d.Path, ErrInUse, strings.TrimSpace(string(raw)))
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("locking %s: %w", path, err)
	}
	// Whose it is, for the message above. The lock itself does not depend on it.
	_ = f.Truncate(0)
	_, _ = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	return func() { f.Close() }, nil
}

// Open is the beginning of every verb that works on a replica's disk:
// what Init or Join left, and the folder locked.
func (d Dir) Open() (cluster Cluster, release func(), err error) {
	if d.Path == "" {
		return cluster, nil, errors.New("--data-dir: a replica needs a folder for its data")
	}
	if err := d.Store.Check(); err != nil {
		return cluster, nil, err
	}
	if cluster, _, err = d.Load(); err != nil {
		return cluster, nil, err
	}
	release, err = d.Lock()
	return cluster, release, err
}

// ownAddress is the content of AddressFile. Releases without AddressFile neither write nor read the file.
type ownAddress struct {
	Address string `json:"address"`
}

// SaveAddress remembers the address that Init or Join was given, for starts and verbs that are given none.
func (d Dir) SaveAddress() error {
	return WriteJSON(filepath.Join(d.Path, AddressFile), ownAddress{d.Advertise})
}

// lastAddress is the address that this replica had last: that of the member, which may have moved since its folder was made, or
// the one that the folder was made with; "" = none is known.
func (d Dir) lastAddress() (string, error) {
	members, err := d.Members()
	if err != nil {
		return "", err
	}
	if host, _, err := net.SplitHostPort(members[d.Name]); err == nil && host != "" {
		return host, nil
	}
	var made ownAddress
	_, err = ReadJSON(filepath.Join(d.Path, AddressFile), &made)
	return made.Address, err
}

// WithAddress is d with the address that the replica had last, where none is given.
func (d Dir) WithAddress() (Dir, error) {
	if d.Advertise != "" || d.Path == "" {
		return d, nil
	}
	var err error
	if d.Advertise, err = d.lastAddress(); err != nil {
		err = fmt.Errorf("the address that this replica had last: %w: --advertise-address says it instead", err)
	}
	return d, err
}

// HostPort joins a host and a port.
func HostPort(host string, port int) string { return net.JoinHostPort(host, strconv.Itoa(port)) }
