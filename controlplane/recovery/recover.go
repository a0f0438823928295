package recovery

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/mvcc"
	"keelson.dev/keelson/raftstore/replica"
)

// RecoveryReport is the result of Recover: the members that are removed, and the data that is kept.
type RecoveryReport struct {
	Cluster string   // name of the cluster
	Members []string // names of the removed members
	// Addresses are the peer addresses of Members, by name.
	Addresses map[string]string
	Reachable []string  // those of Members that accept TCP connections
	Disk      disk.Info // state of this replica's disk
	Address   string    // host of this replica, to which other replicas connect to join
}

// ErrUnsafe is returned by Recover if its parameter confirmed is false, because a recovery may lose
// acknowledged writes.
var ErrUnsafe = errors.New("this may lose acknowledged writes: set --unsafe-lost-majority if the majority of the " +
	"replicas is permanently lost")

// ErrNotLost is returned by Recover if the existing replicas form a majority.
var ErrNotLost = errors.New("the majority of the replicas is not lost")

// checkMajorityLost returns ErrNotLost if this replica and the members that accept connections form
// a majority. It counts members without a vote as voters. In doubt, it therefore refuses a recovery
// that would be safe.
func (l RecoveryReport) checkMajorityLost() error {
	all := len(l.Members) + 1
	if len(l.Reachable) == 0 || len(l.Reachable)+1 < all/2+1 {
		return nil
	}
	return fmt.Errorf("%w: %s of %d members respond, and the disk of this replica is intact: start this "+
		"replica with 'run'. "+
		"If their data is lost, stop their daemons first", ErrNotLost, strings.Join(l.Reachable, ", "), all)
}

// reachableMembers returns the names of the members that accept a TCP connection. members maps
// names to peer addresses.
func reachableMembers(members map[string]string) (out []string) {
	responding := make(chan string)
	for name, address := range members {
		go func() {
			conn, err := net.DialTimeout("tcp", address, 2*time.Second)
			if err != nil {
				responding <- ""
				return
			}
			conn.Close()
			responding <- name
		}()
	}
	for range members {
		if name := <-responding; name != "" {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

// Recover makes this replica the only member of its raft cluster, with the data on its disk. Writes
// that only the other members have are lost. Recover returns ErrNotLost if a majority of the
// replicas still exists. confirmed means that the caller accepts the loss of writes. If it is
// false, Recover changes nothing, and returns ErrUnsafe together with the report.
func Recover(d datadir.Dir, confirmed bool) (RecoveryReport, error) {
	cluster, release, err := d.Open()
	if err != nil {
		return RecoveryReport{}, err
	}
	defer release()
	conf, err := d.OfflineStoreConfig(cluster)
	if err != nil {
		return RecoveryReport{}, err
	}
	out := RecoveryReport{Address: advertisedHost(conf)}
	var damage error
	if out.Disk, damage, err = inspectDisk(d, conf); err != nil {
		return out, err
	}
	switch {
	case errors.Is(damage, disk.ErrNoData):
		return out, fmt.Errorf("%w: run this command on a machine with a replica's disk, or restore a backup", damage)
	case damage != nil:
		return out,
			fmt.Errorf("the data of this replica is damaged: %w: use a replica with an intact disk, or "+
				"restore a backup", damage)
	}
	if err := requireAddress(conf); err != nil {
		return out, err
	}
	members, err := d.Members()
	if err != nil {
		return out, err
	}
	delete(members, d.Name)
	out.Cluster, out.Members, out.Reachable = cluster.Name, slices.Sorted(maps.Keys(members)), reachableMembers(members)
	out.Addresses = members
	if err := out.checkMajorityLost(); err != nil {
		return out, err
	}
	if !confirmed {
		return out, ErrUnsafe
	}
	err = replica.Recover(conf, func(v *mvcc.View) ([]raftstore.Op, error) {
		ops, err := volumeResetOps(v)
		if err != nil {
			return nil, err
		}
		identify, err := incarnationOps(d, v, datadir.IdentityRecord{}, members)
		return append(ops, identify...), err
	})
	if err != nil {
		return out, err
	}
	return out, recordSoleMember(d, conf)
}

// RebuildReport is the result of Rebuild.
type RebuildReport struct {
	MovedTo string   // directory to which the previous data was moved; empty if there was no data
	JoinVia []string // replicas from which this replica requests membership at the next start
}

// Rebuild prepares this replica to copy its data from the other replicas. It moves the existing
// data to another directory. At the next start, the replica is removed from the raft cluster and
// joins it again without data. servers are the other replicas, as HOST or HOST:PORT. If servers is
// empty, the last known members are used.
func Rebuild(d datadir.Dir, servers []string) (RebuildReport, error) {
	cluster, release, err := d.Open()
	if err != nil {
		return RebuildReport{}, err
	}
	defer release()
	conf, err := d.OfflineStoreConfig(cluster)
	if err != nil {
		return RebuildReport{}, err
	}
	peers, err := peersToJoin(d, cluster, servers)
	if err != nil {
		return RebuildReport{}, err
	}
	out := RebuildReport{JoinVia: slices.Sorted(maps.Keys(peers))}
	if _, _, err := inspectDisk(d, conf); err != nil {
		return out, err
	}
	// The data is moved first: a directory with data and PeersFile would look like a replica that
	// was stopped while it joined.
	out.MovedTo, err = disk.SetAside(conf.Disk())
	if err != nil && !errors.Is(err, disk.ErrNoData) && !errors.Is(err, fs.ErrNotExist) {
		return out, err
	}
	if err := datadir.WriteJSON(filepath.Join(d.Path, datadir.PeersFile), peers); err != nil {
		return out, err
	}
	return out, d.ClearAbandoned()
}

func peersToJoin(d datadir.Dir, cluster datadir.Cluster, servers []string) (map[string]string, error) {
	peers := map[string]string{}
	for _, s := range servers {
		host := s
		if h, _, err := net.SplitHostPort(s); err == nil {
			host = h
		}
		if host = strings.Trim(host, "[]"); host == "" {
			return nil, fmt.Errorf("--server %q: give the address of another replica", s)
		}
		peers[host] = datadir.HostPort(host, cluster.PeerPort)
	}
	if len(peers) > 0 {
		return peers, nil
	}
	peers, err := d.Members()
	if err != nil {
		return nil, err
	}
	delete(peers, d.Name)
	if len(peers) == 0 {
		return nil,
			errors.New("--server: no other replica is known from which the data can be copied: name one, or " +
				"restore a backup")
	}
	return peers, nil
}

// recordSoleMember writes MembersFile with this replica as the only member. It removes the files
// that mark this replica as joining, or as excluded by an earlier recovery or restore.
func recordSoleMember(d datadir.Dir, conf replica.Config) error {
	for _, name := range []string{datadir.PeersFile, datadir.NewMemberFile, datadir.AbandonedFile} {
		if err := os.Remove(filepath.Join(d.Path, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return datadir.WriteJSON(filepath.Join(d.Path, datadir.MembersFile),
		map[string]string{d.Name: conf.Network.Advertise})
}

// inspectDisk returns the state of the store on the disk of this replica. damage is the error of
// disk.Inspect if the store is damaged or unreadable; info is then incomplete. err is not nil if
// the data belongs to another replica. Data without a recorded owner is accepted.
func inspectDisk(d datadir.Dir, conf replica.Config) (info disk.Info, damage, err error) {
	info, damage = disk.Inspect(conf.Disk())
	if info.Owner != "" && info.Owner != d.Name {
		err = fmt.Errorf("%s belongs to replica %q, not to %q: %w: set --name to its replica", conf.Storage.DataDir,
			info.Owner, d.Name, disk.ErrForeignData)
	}
	return info, damage, err
}

func advertisedHost(c replica.Config) string {
	host, _, _ := net.SplitHostPort(c.Network.Advertise)
	return host
}

func requireAddress(c replica.Config) error {
	if c.Network.Advertise == "" {
		return errors.New("--advertise-address: want the IP address at which others reach this replica")
	}
	return nil
}
