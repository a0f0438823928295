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

// Lost is what a recovery gives up.
type Lost struct {
	Cluster string   // its name
	Members []string // that are no members any more
	// Addresses are the peer addresses of Members, by name.
	Addresses map[string]string
	Answer    []string      // those of them whose daemons answer
	Disk      disk.DiskInfo // of the replica that goes on
	Address   string        // of that, for the others to ask
}

// ErrUnsafe says that a verb may lose what was acknowledged and was not told to.
var ErrUnsafe = errors.New("this may lose writes that were acknowledged: say --unsafe-lost-majority if the majority of the replicas is gone for good")

// ErrNotLost says that the majority is not lost.
var ErrNotLost = errors.New("the majority of the replicas is not lost")

// notLost refuses a recovery when those that answer and this replica, whose disk is whole, are a majority. A learner
// counts as one of them: that refuses too much rather than too little.
func (l Lost) notLost() error {
	all := len(l.Members) + 1
	if len(l.Answer) == 0 || len(l.Answer)+1 < all/2+1 {
		return nil
	}
	return fmt.Errorf("%w: %s of %d members answer, and this one's disk is whole: start this replica with 'run'. "+
		"If their data is lost, stop their daemons first", ErrNotLost, strings.Join(l.Answer, ", "), all)
}

// answering are the members at whose peer addresses somebody listens.
func answering(members map[string]string) (out []string) {
	heard := make(chan string)
	for name, address := range members {
		go func() {
			conn, err := net.DialTimeout("tcp", address, 2*time.Second)
			if err != nil {
				heard <- ""
				return
			}
			conn.Close()
			heard <- name
		}()
	}
	for range members {
		if name := <-heard; name != "" {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

// Recover makes this replica the only member of its group, with what is on its
// disk. It is for the day on which the majority of the disks is lost, and refuses on others.
func Recover(d datadir.Dir, really bool) (Lost, error) {
	cluster, release, err := d.Open()
	if err != nil {
		return Lost{}, err
	}
	defer release()
	conf, err := d.OfflineStoreConfig(cluster)
	if err != nil {
		return Lost{}, err
	}
	out := Lost{Address: hostOf(conf)}
	var damage error
	if out.Disk, damage, err = inspectDisk(d, conf); err != nil {
		return out, err
	}
	switch {
	case errors.Is(damage, disk.ErrNoData):
		return out, fmt.Errorf("%w: run this where a replica's disk is left, or restore a backup", damage)
	case damage != nil:
		return out, fmt.Errorf("the data of this replica cannot be recovered from: %w: use the replica with a whole disk, or restore a backup", damage)
	}
	if err := needAddress(conf); err != nil {
		return out, err
	}
	members, err := d.Members()
	if err != nil {
		return out, err
	}
	delete(members, d.Name)
	out.Cluster, out.Members, out.Answer = cluster.Name, slices.Sorted(maps.Keys(members)), answering(members)
	out.Addresses = members
	if err := out.notLost(); err != nil {
		return out, err
	}
	if !really {
		return out, ErrUnsafe
	}
	err = replica.Recover(conf, func(v *mvcc.View) ([]raftstore.Op, error) {
		ops, err := unheard(v)
		if err != nil {
			return nil, err
		}
		identify, err := startIncarnation(d, v, datadir.IdentityRecord{}, members)
		return append(ops, identify...), err
	})
	if err != nil {
		return out, err
	}
	return out, recordAlone(d, conf)
}

// Rebuilt is what Rebuild did.
type Rebuilt struct {
	Moved string   // the folder of the previous data; "" when there was none
	Asks  []string // the replicas that the next start asks
}

// Rebuild makes this replica start anew: its data is moved aside, and the next
// start has it taken out of the group and taken in again, empty. servers are
// host[:port] of other replicas; without any, those that it knew last are asked.
func Rebuild(d datadir.Dir, servers []string) (Rebuilt, error) {
	cluster, release, err := d.Open()
	if err != nil {
		return Rebuilt{}, err
	}
	defer release()
	conf, err := d.OfflineStoreConfig(cluster)
	if err != nil {
		return Rebuilt{}, err
	}
	peers, err := whomToAsk(d, cluster, servers)
	if err != nil {
		return Rebuilt{}, err
	}
	out := Rebuilt{Asks: slices.Sorted(maps.Keys(peers))}
	if _, _, err := inspectDisk(d, conf); err != nil {
		return out, err
	}
	// First this: data and a request for membership together would be taken for
	// a replica that was stopped while it joined.
	out.Moved, err = disk.SetAside(conf.Disk())
	if err != nil && !errors.Is(err, disk.ErrNoData) && !errors.Is(err, fs.ErrNotExist) {
		return out, err
	}
	if err := datadir.WriteJSON(filepath.Join(d.Path, datadir.PeersFile), peers); err != nil {
		return out, err
	}
	return out, d.ClearAbandoned()
}

func whomToAsk(d datadir.Dir, cluster datadir.Cluster, servers []string) (map[string]string, error) {
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
		return nil, errors.New("--server: this replica knows of no other one that could give it the data: name one, or restore a backup")
	}
	return peers, nil
}

// recordAlone writes down that this replica's group has no other member.
func recordAlone(d datadir.Dir, conf replica.Config) error {
	for _, name := range []string{datadir.PeersFile, datadir.NewcomerFile, datadir.AbandonedFile} {
		if err := os.Remove(filepath.Join(d.Path, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return datadir.WriteJSON(filepath.Join(d.Path, datadir.MembersFile), map[string]string{d.Name: conf.Advertise})
}

// inspectDisk inspects the store's data and refuses that of another replica. damage is
// what Inspect found wrong besides; data that does not say whose it is passes.
func inspectDisk(d datadir.Dir, conf replica.Config) (info disk.DiskInfo, damage, err error) {
	info, damage = disk.Inspect(conf.Disk())
	if info.Owner != "" && info.Owner != d.Name {
		err = fmt.Errorf("%s is of replica %q and not of %q: %w: --name says whose it is", conf.DataDir, info.Owner, d.Name, disk.ErrForeignData)
	}
	return info, damage, err
}

func hostOf(c replica.Config) string {
	host, _, _ := net.SplitHostPort(c.Advertise)
	return host
}

func needAddress(c replica.Config) error {
	if c.Advertise == "" {
		return errors.New("--advertise-address: give the IP address under which others reach this replica")
	}
	return nil
}
