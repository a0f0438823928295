package recovery

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/recovery/backups"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/mvcc"
)

// Verify reads a whole backup and says what is in it. It needs no data folder.
func Verify(o datadir.StoreOptions, path string) (disk.BackupInfo, error) {
	info, _, err := readBackup(o, path)
	return info, err
}

// InspectBackup is Verify that also says which objects are in it, by their kinds. Of a backup that is sealed under a key
// which is not there it says what the head of the file tells, beside the error.
func InspectBackup(o datadir.StoreOptions, path string) (api.ClusterBackup, error) {
	info, v, err := readBackup(o, path)
	out := api.ClusterBackup{}
	if info.Cluster != "" {
		out = DescribeBackup(info, v, BuiltInKinds())
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

func readBackup(o datadir.StoreOptions, path string) (disk.BackupInfo, *mvcc.View, error) {
	var keys *disk.Keyring
	if o.Keys != "" {
		var err error
		if keys, err = datadir.LoadBackupKeys(o.Keys); err != nil {
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
	Cluster datadir.Cluster
	Members map[string]string // as this replica knew them last: name → peer address
	Joining bool              // the next start asks for membership
	Disk    disk.DiskInfo
}

// Inspect looks into a data folder and changes nothing. What is damaged is an
// error that names the file, beside what could be read.
func Inspect(d datadir.Dir) (Inspection, error) {
	cluster, release, err := d.Open()
	if err != nil {
		return Inspection{}, err
	}
	defer release()
	out := Inspection{Cluster: cluster}
	if out.Members, err = d.Members(); err != nil {
		return out, err
	}
	if _, err := os.Stat(filepath.Join(d.Path, datadir.PeersFile)); err == nil {
		out.Joining = true
	}
	conf, err := d.OfflineStoreConfig(cluster)
	if err != nil {
		return out, err
	}
	if out.Disk, err = disk.Inspect(conf.Disk()); errors.Is(err, disk.ErrNoData) {
		err = nil // that is what there is to say
	}
	return out, err
}

// TrustFolder is where the keys of a replica's cluster are.
func TrustFolder(d datadir.Dir) string { return filepath.Join(d.Path, datadir.PKIFolder) }

// Identity is the cluster that a data folder belongs to.
func Identity(d datadir.Dir) (datadir.Cluster, error) {
	cluster, _, err := d.Load()
	return cluster, err
}
