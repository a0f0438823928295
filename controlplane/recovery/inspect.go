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

// Verify reads and checks the whole backup in the file path and returns its description. It needs
// no data directory of a replica.
func Verify(o datadir.StoreOptions, path string) (disk.BackupInfo, error) {
	info, _, err := readBackup(o, path)
	return info, err
}

// InspectBackup reads and checks the whole backup in the file path, and counts the objects of each
// kind. If a key that decrypts the backup is missing, it returns an error, and a description that
// contains only the header.
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
	if sealed, _ := backups.ReadAgeHeader(f); sealed != nil { // err already contains the error of the header
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

// LastEntry returns the index and term of the last log entry on a disk. If the newest snapshot has
// a higher index, it returns the index and term of that snapshot. To find the most recent of
// several disks, compare the terms first, and for equal terms the indexes.
func LastEntry(i disk.Info) (index, term uint64) {
	if len(i.Snapshots) > 0 && i.Snapshots[0].Index > i.Last {
		return i.Snapshots[0].Index, i.Snapshots[0].Term
	}
	return i.Last, i.LastTerm
}

// Inspection is the result of Inspect.
type Inspection struct {
	Cluster datadir.Cluster
	Members map[string]string // peer addresses of the last known members, by name
	Joining bool              // at the next start, the replica requests membership
	Disk    disk.Info
}

// Inspect reads a data directory and changes nothing. If a file is damaged, it returns what is
// readable together with an error that names the file.
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
		err = nil // an empty data directory is a valid result
	}
	return out, err
}

// TrustFolder returns the path of the folder with the cluster's keys and CAs in the data directory
// d.
func TrustFolder(d datadir.Dir) string { return filepath.Join(d.Path, datadir.PKIFolder) }

// LoadCluster returns the configuration of the cluster to which the data directory d belongs.
func LoadCluster(d datadir.Dir) (datadir.Cluster, error) {
	cluster, _, err := d.Load()
	return cluster, err
}
