package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/server/backups"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/mvcc"
	"keelson.dev/keelson/raftstore/replica"
)

// The verbs below work on the disk of a replica whose daemon is stopped. Each
// locks the data folder, and refuses before it changes anything.

// members reads who was a member when this replica last knew: name → peer address.
func (c Config) members() (map[string]string, error) {
	var out map[string]string
	_, err := readJSON(filepath.Join(c.DataDir, membersFile), &out)
	return out, err
}

// alone writes down that this replica's group has no other member.
func (c Config) alone(conf replica.Config) error {
	for _, name := range []string{peersFile, newcomerFile, abandonedFile} {
		if err := os.Remove(filepath.Join(c.DataDir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return writeJSON(filepath.Join(c.DataDir, membersFile), map[string]string{c.Name: conf.Advertise})
}

// look inspects the store's data and refuses that of another replica. damage is
// what Inspect found wrong besides; data that does not say whose it is passes.
func (c Config) look(conf replica.Config) (info disk.DiskInfo, damage, err error) {
	info, damage = disk.Inspect(conf.Disk())
	if info.Owner != "" && info.Owner != c.Name {
		err = fmt.Errorf("%s is of replica %q and not of %q: %w: --name says whose it is", conf.DataDir, info.Owner, c.Name, disk.ErrForeignData)
	}
	return info, damage, err
}

// offlineStore is the store's configuration with the address that the replica
// had last, where none is given.
func (c Config) offlineStore(cluster Cluster) (replica.Config, error) {
	c, err := c.addressed()
	if err != nil {
		return replica.Config{}, err
	}
	return c.store(cluster)
}

func hostOf(c replica.Config) string {
	host, _, _ := splitHost(c.Advertise)
	return host
}

func needAddress(c replica.Config) error {
	if c.Advertise == "" {
		return errors.New("--advertise-address: give the IP address under which others reach this replica")
	}
	return nil
}

// Verify reads a whole backup and says what is in it. It needs no data folder.
func Verify(o StoreOptions, path string) (disk.BackupInfo, error) {
	info, _, err := o.readBackup(path)
	return info, err
}

// InspectBackup is Verify that also says which objects are in it, by their kinds. Of a backup that is sealed under a key
// which is not there it says what the head of the file tells, beside the error.
func InspectBackup(o StoreOptions, path string) (api.ClusterBackup, error) {
	info, v, err := o.readBackup(path)
	out := api.ClusterBackup{}
	if info.Cluster != "" {
		out = describeBackup(info, v, builtIn())
	}
	f, opened := os.Open(path)
	if opened != nil {
		return out, err
	}
	defer f.Close()
	if sealed, _ := backups.Sealing(f); sealed != nil { // what is wrong with it was said
		out.Sealed, out.Recipients = true, sealed.Recipients
	}
	return out, err
}

func (o StoreOptions) readBackup(path string) (disk.BackupInfo, *mvcc.View, error) {
	var keys *disk.Keyring
	if o.Keys != "" {
		var err error
		if keys, err = backupKeys(o.Keys); err != nil {
			return disk.BackupInfo{}, nil, fmt.Errorf("--encryption-keys: %w", err)
		}
	}
	f, err := os.Open(path)
	if err != nil {
		return disk.BackupInfo{}, nil, err
	}
	defer f.Close()
	in, _, err := backups.Open(f, o.Identity)
	if err != nil {
		return disk.BackupInfo{}, nil, fmt.Errorf("%s: %w", path, err)
	}
	info, v, err := disk.ReadBackup(in, keys)
	if err != nil {
		return info, nil, fmt.Errorf("%s: %w", path, err)
	}
	return info, v, nil
}

// RestoreOptions say what Restore may do beyond filling an empty replica.
type RestoreOptions struct {
	AnyCluster bool   // take a backup of another cluster
	Replace    bool   // move the replica's own data aside
	BackupKeys string // file of keys for a backup that is encrypted under none of the store's
	Identity   string // file of age identities for a backup that is sealed by age
	// Beside restores although other replicas answer: their cluster is left behind.
	Beside bool

	asItIs bool // to be looked at: join tokens are there, too
}

// Restored is what Restore did.
type Restored struct {
	Backup  disk.BackupInfo
	Moved   string   // the folder of the previous data; "" if there was none
	Address string   // of this replica, for the others to ask
	Revoked []string // nodes whose revocation was carried over from the previous data
	// Abandoned are the peer addresses of the replicas that were members, by name: their data must be replaced before they start.
	Abandoned map[string]string
	Joined    []string // nodes that joined after the backup was made, from the previous data: each must report its volumes
	Tokens    int      // join tokens of the backup, which are invalid
	// Unread is why it is not known, or not for certain, who joined or was revoked since the backup was made; nil when it is.
	Unread error
}

// ErrOthersRun says that a restore would make a second cluster beside one that serves.
var ErrOthersRun = errors.New("other replicas of this cluster answer")

// noneRuns refuses a restore while members of this replica's group run: with the keys of both groups the same, agents and
// clients would come to the one or the other.
func (c Config) noneRuns() error {
	members, err := c.members()
	if err != nil {
		return err
	}
	delete(members, c.Name)
	if run := answering(members); len(run) > 0 {
		return fmt.Errorf("%w: %s. Restored beside them, there would be two clusters with the same keys: stop their daemons first, "+
			"or say --leave-others-behind where that is meant", ErrOthersRun, strings.Join(run, ", "))
	}
	return nil
}

// Restore makes this replica the first of a new group that holds what the
// backup holds. Nothing is changed unless the whole backup is good.
func Restore(c Config, path string, o RestoreOptions) (Restored, error) {
	cluster, release, err := c.openFolder()
	if err != nil {
		return Restored{}, err
	}
	defer release()
	conf, err := c.offlineStore(cluster)
	if err == nil {
		err = needAddress(conf)
	}
	if err != nil {
		return Restored{}, err
	}
	if conf.Keys, err = c.keysOfBackups(cluster, o.BackupKeys); err != nil {
		return Restored{}, err
	}
	f, err := os.Open(path)
	if err != nil {
		return Restored{}, err
	}
	defer f.Close()
	in, _, err := backups.Open(f, o.Identity)
	if err != nil {
		return Restored{}, fmt.Errorf("%s: %w", path, err)
	}
	out := Restored{Address: hostOf(conf)}
	var stored []byte
	out.Backup, stored, err = disk.FromBackup(in, conf.Keys, levelKey)
	if err != nil && !errors.Is(err, disk.ErrSealed) {
		return out, fmt.Errorf("%s: %w", path, err)
	}
	if got := out.Backup.Cluster; got != cluster.ID && !o.AnyCluster { // its head is in clear
		return out, fmt.Errorf("%s is of cluster %q and this is %q: %w: say --any-cluster to take it all the same", path, got, cluster.ID, disk.ErrForeignBackup)
	}
	if err != nil {
		return out, fmt.Errorf("%s: %w: --backup-keys names the key file of that time", path, err)
	}
	var rec levelRecord
	if stored != nil {
		if rec, err = decodeLevel(stored); err == nil {
			err = rec.understood(c.understands())
		}
	}
	if err != nil {
		return out, fmt.Errorf("%s: %w", path, err)
	}
	if _, err := in.Seek(0, io.SeekStart); err != nil {
		return out, err
	}
	if out.Abandoned, err = c.members(); err != nil {
		return out, err
	}
	delete(out.Abandoned, c.Name)
	if !o.Beside {
		if err := c.noneRuns(); err != nil {
			return out, err
		}
	}
	to := disk.RestoreOptions{Advertise: conf.Advertise, Cluster: conf.Cluster, AnyCluster: o.AnyCluster}
	with := newCarried()
	if !o.asItIs {
		out.Unread = c.carry(conf, o.Replace, &with)
		with.foreign = out.Backup.Cluster != cluster.ID
		to.Amend = func(v *mvcc.View) ([]raftstore.Op, error) {
			ops, err := with.amend(v)
			if err != nil {
				return nil, err
			}
			identify, err := c.startIncarnation(v, with.identity, out.Abandoned)
			return append(ops, identify...), err
		}
	}
	if out.Moved, to.Above, err = c.makeRoom(conf, o.Replace); err != nil {
		return out, err
	}
	to.Above = max(to.Above, with.revision)
	if out.Backup, err = disk.Restore(conf.Disk(), in, to); err != nil {
		if out.Moved != "" {
			err = fmt.Errorf("%w (the previous data is in %s)", err, out.Moved)
		}
		return out, err
	}
	out.Revoked, out.Joined, out.Tokens = with.revoked, with.joined, with.tokens
	if err := keepLevel(c.DataDir, rec); err != nil { // it may be below that of the previous data
		return out, err
	}
	return out, c.alone(conf)
}

// keysOfBackups are those of the store, with those that backups of before an exchange need, and those of a file.
func (c Config) keysOfBackups(cluster Cluster, file string) (keys *disk.Keyring, err error) {
	own, err := c.keyFile(cluster)
	if err != nil {
		return nil, err
	}
	if own != "" {
		if keys, err = backupKeys(own); err != nil {
			return nil, fmt.Errorf("--encryption-keys: %w", err)
		}
	}
	if file == "" {
		return keys, nil
	}
	further, err := backupKeys(file)
	if err == nil {
		keys, err = keys.With(further)
	}
	if err != nil {
		return nil, fmt.Errorf("--backup-keys: %w", err)
	}
	return keys, nil
}

// makeRoom moves this replica's data aside where there is some, and says of which revision it is at least.
func (c Config) makeRoom(conf replica.Config, replace bool) (moved string, was raftstore.Revision, err error) {
	has, err := c.hasRaftData()
	if err != nil || !has {
		return "", 0, err
	}
	info, _, err := c.look(conf)
	if err != nil {
		return "", 0, err
	}
	if !replace {
		return "", 0, fmt.Errorf("%s: %w: say --replace to move what is there aside", conf.DataDir, disk.ErrNotEmpty)
	}
	for _, s := range info.Snapshots {
		was = max(was, s.Revision)
	}
	moved, err = disk.SetAside(conf.Disk())
	return moved, was, err
}

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
func Recover(c Config, really bool) (Lost, error) {
	cluster, release, err := c.openFolder()
	if err != nil {
		return Lost{}, err
	}
	defer release()
	conf, err := c.offlineStore(cluster)
	if err != nil {
		return Lost{}, err
	}
	out := Lost{Address: hostOf(conf)}
	var damage error
	if out.Disk, damage, err = c.look(conf); err != nil {
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
	members, err := c.members()
	if err != nil {
		return out, err
	}
	delete(members, c.Name)
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
		identify, err := c.startIncarnation(v, identityRecord{}, members)
		return append(ops, identify...), err
	})
	if err != nil {
		return out, err
	}
	return out, c.alone(conf)
}

// Rebuilt is what Rebuild did.
type Rebuilt struct {
	Moved string   // the folder of the previous data; "" when there was none
	Asks  []string // the replicas that the next start asks
}

// Rebuild makes this replica start anew: its data is moved aside, and the next
// start has it taken out of the group and taken in again, empty. servers are
// host[:port] of other replicas; without any, those that it knew last are asked.
func Rebuild(c Config, servers []string) (Rebuilt, error) {
	cluster, release, err := c.openFolder()
	if err != nil {
		return Rebuilt{}, err
	}
	defer release()
	conf, err := c.offlineStore(cluster)
	if err != nil {
		return Rebuilt{}, err
	}
	peers, err := c.whomToAsk(cluster, servers)
	if err != nil {
		return Rebuilt{}, err
	}
	out := Rebuilt{Asks: slices.Sorted(maps.Keys(peers))}
	if _, _, err := c.look(conf); err != nil {
		return out, err
	}
	// First this: data and a request for membership together would be taken for
	// a replica that was stopped while it joined.
	out.Moved, err = disk.SetAside(conf.Disk())
	if err != nil && !errors.Is(err, disk.ErrNoData) && !errors.Is(err, fs.ErrNotExist) {
		return out, err
	}
	if err := writeJSON(filepath.Join(c.DataDir, peersFile), peers); err != nil {
		return out, err
	}
	return out, c.clearAbandoned()
}

func (c Config) whomToAsk(cluster Cluster, servers []string) (map[string]string, error) {
	peers := map[string]string{}
	for _, s := range servers {
		host := s
		if h, _, err := splitHost(s); err == nil {
			host = h
		}
		if host = strings.Trim(host, "[]"); host == "" {
			return nil, fmt.Errorf("--server %q: give the address of another replica", s)
		}
		peers[host] = at(host, cluster.PeerPort)
	}
	if len(peers) > 0 {
		return peers, nil
	}
	peers, err := c.members()
	if err != nil {
		return nil, err
	}
	delete(peers, c.Name)
	if len(peers) == 0 {
		return nil, errors.New("--server: this replica knows of no other one that could give it the data: name one, or restore a backup")
	}
	return peers, nil
}

// ConvertLog changes the log store of this replica.
func ConvertLog(ctx context.Context, c Config, to string, progress func(done, total uint64)) error {
	if to != string(disk.LogBolt) && to != string(disk.LogWAL) {
		return fmt.Errorf("--to %q: want %s or %s", to, disk.LogBolt, disk.LogWAL)
	}
	cluster, release, err := c.openFolder()
	if err != nil {
		return err
	}
	defer release()
	conf, err := c.offlineStore(cluster)
	if err != nil {
		return err
	}
	if err := disk.Convert(ctx, conf.Disk(), disk.LogStoreKind(to), progress); err != nil {
		return err
	}
	return c.choose(to)
}

// LastEntry is the last log entry whose effect a disk holds, and its term. Of
// several disks that with the higher term has more, and then that with the higher index.
func LastEntry(i disk.DiskInfo) (index, term uint64) {
	if len(i.Snapshots) > 0 && i.Snapshots[0].Index > i.Last {
		return i.Snapshots[0].Index, i.Snapshots[0].Term
	}
	return i.Last, i.LastTerm
}

// Inspection is what Inspect finds.
type Inspection struct {
	Cluster Cluster
	Members map[string]string // as this replica knew them last: name → peer address
	Joining bool              // the next start asks for membership
	Disk    disk.DiskInfo
}

// Inspect looks into a data folder and changes nothing. What is damaged is an
// error that names the file, beside what could be read.
func Inspect(c Config) (Inspection, error) {
	cluster, release, err := c.openFolder()
	if err != nil {
		return Inspection{}, err
	}
	defer release()
	out := Inspection{Cluster: cluster}
	if out.Members, err = c.members(); err != nil {
		return out, err
	}
	if _, err := os.Stat(filepath.Join(c.DataDir, peersFile)); err == nil {
		out.Joining = true
	}
	conf, err := c.offlineStore(cluster)
	if err != nil {
		return out, err
	}
	if out.Disk, err = disk.Inspect(conf.Disk()); errors.Is(err, disk.ErrNoData) {
		err = nil // that is what there is to say
	}
	return out, err
}

// errDataGone says that a replica which took part in the group has lost its disk.
var errDataGone = errors.New("the data of this replica is gone, but it was a member of the group: " +
	"it must not vote with an empty log. Run 'rebuild' to take the data from the other replicas, or 'restore' with a backup")

// begins says whether this replica founds a group, and refuses one that would
// take part in its own without what it has promised there.
func (c Config) begins() (bool, error) {
	if _, err := os.Stat(filepath.Join(c.DataDir, peersFile)); err == nil {
		return false, nil // it joins
	}
	has, err := c.hasRaftData()
	if err != nil {
		return false, err
	}
	members, err := c.members()
	if err != nil {
		return false, err
	}
	_, was := members[c.Name]
	if !has && (was || !c.isFounder()) {
		return false, fmt.Errorf("%s: %w", filepath.Join(c.DataDir, raftFolder), errDataGone)
	}
	return c.isFounder() && !was, nil
}
