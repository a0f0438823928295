// Package datadir describes the data directory of a replica: its files and their lock, the cluster
// to which it belongs, and the configuration of its store. It also defines records of the cluster
// that are stored in the directory or in the store, such as its feature level and its identity. The
// parts of the control plane that work on a data directory import this package; it imports none of
// them.
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

// Dir is the data directory of one replica, and the settings of the replica on which its files
// depend.
type Dir struct {
	Name         string // name of the replica; it never changes for a directory
	Path         string // path of the directory, which init or join created
	Advertise    string // IP address at which agents, replicas and users reach the replica
	Store        StoreOptions
	Log          *slog.Logger
	FeatureLevel uint32 // the highest level that this release supports
}

// The names of a replica's files and folders in its data directory.
const (
	PKIFolder   = "pki"
	RaftFolder  = "raft"
	ClusterFile = "cluster.json"
	// on the replica that created the cluster: join tokens that are not in the store yet
	FounderFile   = "founder.json"
	PeersFile     = "peers.json"         // on a joining replica: the replicas from which to request membership
	NewMemberFile = "newcomer.json"      // replaces PeersFile on a new member, until it has caught up with the leader
	MembersFile   = "members.json"       // the last known members, for a rebuild of the replica
	storeFile     = "store.json"         // the configured format of the raft log
	StandbyFile   = "standby.json"       // exists on a replica that joined as a standby, until it becomes a voter
	AddressFile   = "address.json"       // the replica's address from Init or Join, until MembersFile contains it
	LevelFile     = "feature-level.json" // the feature level of the cluster that this replica has applied
	lockFile      = "lock"               // locked by the process that uses the directory
	AdminFile     = "admin.kubeconfig"
)

// ErrNotInitialized is returned for a data directory that belongs to no cluster.
var ErrNotInitialized = errors.New("the data directory belongs to no cluster: run 'init' on the first replica or " +
	"'join' on a further one")

// WriteJSON writes v as JSON to the file path, atomically and durably (pki.WriteFile).
func WriteJSON(path string, v any) error {
	raw, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return pki.WriteFile(path, append(raw, '\n'))
}

// ReadJSON decodes a JSON file into v. It returns false if the file does not exist.
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

// Load reads the configuration of the cluster, and its keys and CAs, which Init or Join has written
// to the directory.
func (d Dir) Load() (Cluster, *pki.Trust, error) {
	var cluster Cluster
	found, err := ReadJSON(filepath.Join(d.Path, ClusterFile), &cluster)
	if err != nil {
		return cluster, nil, err
	}
	if !found {
		return cluster, nil, fmt.Errorf("%s: %w", d.Path, ErrNotInitialized)
	}
	trust, err := pki.Load(filepath.Join(d.Path, PKIFolder))
	if err != nil {
		return cluster, nil, err
	}
	return cluster, trust, cluster.SetID(trust)
}

// ErrInUse is returned by Lock if another process has locked the data directory.
var ErrInUse = errors.New("the data directory is in use")

// Lock locks the data directory for this process until release is called, because two processes
// that change one directory would destroy its data. If another process has the lock, the error
// wraps ErrInUse. The kernel releases the lock when a process exits.
func (d Dir) Lock() (release func(), err error) {
	path := filepath.Join(d.Path, lockFile)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("locking the data directory: %w", err)
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
	// The PID of the owner is for the message above. The lock does not depend on it.
	_ = f.Truncate(0)
	_, _ = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	return func() { f.Close() }, nil
}

// Open reads the configuration of the cluster and locks the data directory. It is for commands that
// work on the directory of a stopped replica. release unlocks the directory.
func (d Dir) Open() (cluster Cluster, release func(), err error) {
	if d.Path == "" {
		return cluster, nil, errors.New("--data-dir: a replica needs a data directory")
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

// addressRecord is the content of AddressFile. Old releases do not use the file.
type addressRecord struct {
	Address string `json:"address"`
}

// SaveAddress writes d.Advertise, the address that was given to Init or Join, to AddressFile. If no
// address is given to a later start or command, it uses this address.
func (d Dir) SaveAddress() error {
	return WriteJSON(filepath.Join(d.Path, AddressFile), addressRecord{d.Advertise})
}

// lastAddress returns the last address of this replica: its address in MembersFile, or the address
// that was given to Init or Join. It returns "" if neither is recorded.
func (d Dir) lastAddress() (string, error) {
	members, err := d.Members()
	if err != nil {
		return "", err
	}
	if host, _, err := net.SplitHostPort(members[d.Name]); err == nil && host != "" {
		return host, nil
	}
	var made addressRecord
	_, err = ReadJSON(filepath.Join(d.Path, AddressFile), &made)
	return made.Address, err
}

// WithAddress returns a copy of d. If d.Advertise is empty, the copy has the last address of the
// replica (lastAddress).
func (d Dir) WithAddress() (Dir, error) {
	if d.Advertise != "" || d.Path == "" {
		return d, nil
	}
	var err error
	if d.Advertise, err = d.lastAddress(); err != nil {
		err = fmt.Errorf("reading the last address of this replica: %w: set --advertise-address instead", err)
	}
	return d, err
}

// HostPort joins a host and a port.
func HostPort(host string, port int) string { return net.JoinHostPort(host, strconv.Itoa(port)) }
